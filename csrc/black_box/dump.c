#include "dump.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "recorder.h"

/* Appends a number. */
static char *put_number(char *end, unsigned long number)
{
  char digit[24];
  int count = 0;
  do
    digit[count++] = (char)('0' + number % 10);
  while (number /= 10);
  while (count)
    *end++ = digit[--count];
  *end = 0;
  return end;
}

/* Whether there is something else than a file, such as a device. */
static bool is_no_file(const char *path)
{
  struct stat about;
  return lstat(path, &about) == 0 && !S_ISREG(about.st_mode) && !S_ISLNK(about.st_mode) &&
         !S_ISDIR(about.st_mode); /* which rename() refuses */
}

static int write_part(const char *part, const char *path, const char *why, const char *info,
                      bool urgent)
{
  int file = open(part, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0)
    return errno;
  int error = box_write(file, why, info, urgent);
  if (close(file) < 0 && !error)
    error = errno;
  if (!error && rename(part, path) < 0)
    error = errno;
  if (error)
    unlink(part);
  return error;
}

/* From a signal's handler as well: then, while another thread writes, nothing is. */
int dump_to(const char *path, const char *why, const char *info, bool urgent)
{
  static _Atomic pid_t writer; /* the process whose thread writes; 0: none */
  pid_t self = getpid(), by = 0;
  char part[DUMP_PATH + 32];
  size_t length = strlen(path);
  if (length >= DUMP_PATH)
    return ENAMETOOLONG;
  if (is_no_file(path))
    return EEXIST;
  while (!atomic_compare_exchange_weak(&writer, &by, self)) {
    if (by != self)
      continue; /* that thread is the parent's: this process was forked meanwhile */
    if (urgent)
      return EAGAIN;
    sched_yield();
    by = 0;
  }
  memcpy(part, path, length + 1);
  put_number(stpcpy(part + length, ".part"), (unsigned long)self);
  unlink(part); /* of a process that died and had this number */
  int error = write_part(part, path, why, info, urgent);
  atomic_store(&writer, 0);
  return error;
}

/* ---- out of memory ------------------------------------------------------------- */

static char oom_path[DUMP_PATH];

static int keep_path(char *kept, const char *path)
{
  if (path && strlen(path) >= DUMP_PATH)
    return ENAMETOOLONG;
  snprintf(kept, DUMP_PATH, "%s", path ? path : "");
  return 0;
}

int dump_at_oom(const char *path)
{
  return keep_path(oom_path, path);
}

const char *dump_oom(const char *info)
{
  enum { APART = 10 };
  static _Atomic int64_t last;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int64_t before = atomic_load(&last), seconds = (int64_t)now.tv_sec + APART;
  if (!*oom_path || !box_is_on() || (before && seconds - before < APART) ||
      !atomic_compare_exchange_strong(&last, &before, seconds))
    return NULL;
  return dump_to(oom_path, "out of memory", info, false) == 0 ? oom_path : NULL;
}

/* ---- signals ---------------------------------------------------------------------- */

static char signal_path[DUMP_PATH];
static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
enum { FATAL = sizeof fatal / sizeof *fatal };
static struct sigaction before[FATAL];

static void write_at_signal(int number)
{
  char why[32];
  put_number(stpcpy(why, "signal "), (unsigned long)number);
  if (*signal_path && box_is_on())
    dump_to(signal_path, why, NULL, true);
}

static struct sigaction before_asked;

/* An earlier handler still gets the signal. */
static void asked(int number, siginfo_t *about, void *context)
{
  int error = errno;
  write_at_signal(number);
  if (before_asked.sa_flags & SA_SIGINFO)
    before_asked.sa_sigaction(number, about, context);
  else if (before_asked.sa_handler != SIG_DFL && before_asked.sa_handler != SIG_IGN)
    before_asked.sa_handler(number);
  errno = error;
}

/* Then the handler that was there before gets the signal: the instruction that failed is executed
 * again, and a signal that was sent is sent again. */
static void dies(int number, siginfo_t *about, void *context)
{
  (void)context;
  for (int i = 0; i < FATAL; i++)
    sigaction(fatal[i], &before[i], NULL);
  write_at_signal(number);
  if (about->si_code <= 0)
    raise(number);
}

void dump_no_more(void)
{
  *oom_path = *signal_path = 0;
}

int dump_at_signals(const char *path)
{
  static atomic_bool installed;
  int error = keep_path(signal_path, path);
  if (error || atomic_exchange(&installed, true))
    return error;
  struct sigaction by_request = {.sa_sigaction = asked, .sa_flags = SA_RESTART | SA_SIGINFO};
  struct sigaction by_fault = {.sa_sigaction = dies, .sa_flags = SA_ONSTACK | SA_SIGINFO};
  if (sigaction(SIGUSR2, &by_request, &before_asked) < 0)
    return errno;
  for (int i = 0; i < FATAL; i++)
    if (sigaction(fatal[i], &by_fault, &before[i]) < 0)
      return errno;
  return 0;
}
