#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static check_test *first, **last = &first;
static check_test *running;

void check_register(check_test *test)
{
  *last = test;
  last = &test->next;
}

const check_test *check_first(void)
{
  return first;
}

int check_passes(const check_test *test)
{
  fflush(NULL);
  pid_t child = fork();
  if (child < 0)
    check_failed(__FILE__, __LINE__, "no process");
  if (child == 0) {
    int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    dup2(nowhere, STDERR_FILENO);
    alarm(200); /* a test that hangs has failed */
    test->run();
    _exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int check_aborts(void (*run_it)(void), const char *message)
{
  FILE *said = tmpfile();
  fflush(NULL);
  pid_t child = said ? fork() : -1;
  if (child < 0)
    check_failed(__FILE__, __LINE__, "no process");
  if (child == 0) {
    dup2(fileno(said), STDERR_FILENO);
    alarm(200); /* a test that hangs has failed */
    run_it();
    _exit(0);
  }
  int status;
  char text[4096];
  waitpid(child, &status, 0);
  rewind(said);
  text[fread(text, 1, sizeof text - 1, said)] = '\0';
  fclose(said);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && strstr(text, message) != NULL;
}

typedef struct other_thread {
  void (*run)(void *context);
  void *context;
} other_thread;

static void *other_thread_run(void *argument)
{
  const other_thread *other = argument;
  other->run(other->context);
  return NULL;
}

void check_on_another_thread(void (*run_it)(void *context), void *context)
{
  pthread_t thread;
  other_thread other = {run_it, context};
  if (pthread_create(&thread, NULL, other_thread_run, &other) != 0)
    check_failed(__FILE__, __LINE__, "no thread");
  pthread_join(thread, NULL);
}

_Noreturn void check_failed(const char *file, int line, const char *format, ...)
{
  fflush(stdout);
  fprintf(stderr, "%s:%d: in %s: ", file, line, running ? running->name : "(none)");
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, "\n");
  fflush(NULL);
  _exit(1); /* a GPU's driver would wait for work that may never complete */
}

static long malloc_calls = -1;
static int only_one;

void check_limit_malloc(long calls)
{
  malloc_calls = calls;
  only_one = 0;
}

void check_fail_malloc(long calls)
{
  malloc_calls = calls;
  only_one = 1;
}

static int may_call(void)
{
  if (malloc_calls == 0) {
    malloc_calls -= only_one;
    return 0;
  }
  if (malloc_calls > 0) /* threads may call while no limit is set */
    malloc_calls--;
  return 1;
}

/* The linker replaces malloc, calloc, realloc, aligned_alloc and mmap with these. */
void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size)
{
  return may_call() ? __real_malloc(size) : NULL;
}

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size)
{
  return !only_one || may_call() ? __real_calloc(count, size) : NULL;
}

void *__real_realloc(void *ptr, size_t size);
void *__wrap_realloc(void *ptr, size_t size);
void *__wrap_realloc(void *ptr, size_t size)
{
  return may_call() ? __real_realloc(ptr, size) : NULL;
}

void *__real_aligned_alloc(size_t alignment, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
  return may_call() ? __real_aligned_alloc(alignment, size) : NULL;
}

void *__real_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset);
void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset);
void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
  return may_call() ? __real_mmap(at, size, protection, flags, file, offset) : MAP_FAILED;
}

static check_test *find(const char *name)
{
  check_test *test = first;
  while (test && strcmp(test->name, name))
    test = test->next;
  return test;
}

static void run(check_test *test)
{
  running = test;
  printf("%s\n", test->name);
  fflush(stdout);
  test->run();
  running = NULL;
}

int main(int count, char **arguments)
{
  if (count == 2 && strcmp(arguments[1], "--list") == 0) {
    for (check_test *test = first; test; test = test->next)
      printf("%s\n", test->name);
    return 0;
  }
  for (int i = 1; i < count; i++)
    if (!find(arguments[i])) {
      fprintf(stderr, "%s: there is no test named %s; see --list\n", arguments[0], arguments[i]);
      return 2;
    }
  for (int i = 1; i < count; i++)
    run(find(arguments[i]));
  if (count == 1)
    for (check_test *test = first; test; test = test->next)
      run(test);
  return 0;
}
