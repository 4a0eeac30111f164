/* test_fd_server.c: files that one process offers and another takes (device/fd_server.c), with
 * files of our own. One scenario a process: test_fd_server SCENARIO. Run by
 * tests/test_fd_server.py, which builds it. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../csrc/device/fd_server.h"
#include "scenarios.h"

#define CHECK_IS(x, y)                                                                      \
  do {                                                                                      \
    long long is = (long long)(x), should = (long long)(y);                                 \
    if (is != should) {                                                                     \
      fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #x, is, should); \
      _exit(1);                                                                             \
    }                                                                                       \
  } while (0)
#define CHECK(x) CHECK_IS(!!(x), 1)

/* A file that holds the object's number, after so many milliseconds. */
static int open_file(int milliseconds, uint64_t object)
{
  if (milliseconds)
    usleep((useconds_t)milliseconds * 1000);
  int file = memfd_create("object", MFD_CLOEXEC);
  CHECK(write(file, &object, sizeof object) == sizeof object);
  return file;
}

static atomic_bool being_asked, may_answer;

static int open_when_told(int device, uint64_t object)
{
  (void)device;
  atomic_store(&being_asked, true);
  while (!atomic_load(&may_answer))
    usleep(1000);
  return open_file(0, object);
}

static int refuse_to_open(int device, uint64_t object)
{
  (void)device, (void)object;
  return -1;
}

static fd_server_name offer(int milliseconds, uint64_t object)
{
  fd_server_name name;
  CHECK_IS(fd_server_offer(open_file, milliseconds, object, -1, &name), 0);
  return name;
}

/* 0 and the right file, or an errno. */
static int take(fd_server_name name, uint64_t object)
{
  uint64_t found = 0;
  int file = -1, error = fd_server_take(&name, &file);
  if (error) {
    CHECK_IS(file, -1);
    return error;
  }
  CHECK(pread(file, &found, sizeof found, 0) == sizeof found);
  CHECK_IS(found, object);
  close(file);
  return 0;
}

static void wait_for_files(int count)
{
  for (int i = 0; open_files() != count; i++) { /* the thread that answers is closing */
    CHECK(i < 10000);
    usleep(10000);
  }
}

static double now(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static pid_t fork_with_alarm(void)
{
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0)
    alarm(300);
  return child;
}

static void expect_success(pid_t child)
{
  int status;
  CHECK_IS(waitpid(child, &status, 0), child);
  CHECK_IS(status, 0);
}

static void receive(int from, fd_server_name *name)
{
  CHECK(read(from, name, sizeof *name) == sizeof *name);
}

static void send_name(int to, fd_server_name name)
{
  CHECK(write(to, &name, sizeof name) == sizeof name);
}

/* ---- who gets what --------------------------------------------------------- */

/* Who knows one offer, or the name of the socket, which is public, knows no other. */
SCENARIO(guess)
{
  fd_server_name name = offer(0, 1), second = offer(0, 2);
  CHECK_IS(take(name, 1), 0);
  CHECK_IS(take(second, 2), 0);
  for (int i = -100; i <= 100; i++) {
    fd_server_name guess = name;
    guess.number += (uint64_t)i;
    CHECK_IS(take(guess, 1), i ? ENOENT : 0);
    guess.number = (uint64_t)(i + 100);
    CHECK_IS(take(guess, 1), ENOENT);
  }
  fd_server_withdraw(second.number);
  CHECK_IS(take(second, 2), ENOENT);
  CHECK_IS(take(name, 1), 0);
}

SCENARIO(refused)
{
  fd_server_name name = offer(0, 1), broken;
  CHECK_IS(fd_server_offer(refuse_to_open, 0, 7, -1, &broken), 0);
  int files = open_files();
  CHECK_IS(take(broken, 7), EIO);
  fd_server_name other = name;
  other.key ^= 1;
  CHECK_IS(take(other, 1), ECONNREFUSED);
  other = name;
  other.process++;
  CHECK_IS(take(other, 1), ECONNREFUSED);
  wait_for_files(files);
}

static atomic_int opened;

static int open_inheritable(int device, uint64_t object)
{
  int file = open_file(device, object);
  atomic_fetch_add(&opened, 1);
  CHECK_IS(fcntl(file, F_SETFD, 0), 0);
  return file;
}

/* Open files that a program would inherit. */
static int files_for_programs(void)
{
  int count = 0;
  for (int file = 0; file < 1024; file++) {
    int flags = fcntl(file, F_GETFD);
    count += flags >= 0 && !(flags & FD_CLOEXEC);
  }
  return count;
}

static void check_all(const fd_server_name *names, uint64_t count)
{
  for (uint64_t i = 0; i < count; i++)
    CHECK_IS(take(names[i], i), 0);
}

/* A few are opened once, many take no more files than 128, and none stays open when its offer is
 * withdrawn, in a child, or in another program. */
SCENARIO(kept)
{
  enum { FEW = 100, MANY = 400, AT_MOST = 128 };
  static fd_server_name names[MANY];
  (void)offer(0, 1); /* the socket is open now */
  int files = open_files(), for_programs = files_for_programs();
  for (uint64_t i = 0; i < MANY; i++) {
    int file = open_inheritable(0, i);
    CHECK_IS(fd_server_offer(open_inheritable, 0, i, file, &names[i]), 0);
  }
  wait_for_files(files + AT_MOST);
  check_all(names, FEW);
  atomic_store(&opened, 0);
  check_all(names, FEW);
  CHECK_IS(atomic_load(&opened), 0);
  check_all(names, MANY);
  wait_for_files(files + AT_MOST);
  CHECK_IS(files_for_programs(), for_programs);
  pid_t child = fork_with_alarm();
  if (child == 0) {
    CHECK(open_files() <= files); /* the socket is not among them either */
    _exit(0);
  }
  expect_success(child);
  check_all(names, MANY);
  for (uint64_t i = 0; i < MANY; i++) {
    fd_server_withdraw(names[i].number);
    CHECK_IS(take(names[i], i), ENOENT);
  }
  wait_for_files(files);
}

/* One descriptor is enough for the one who answers, again and again. */
SCENARIO(last_descriptor)
{
  int names[2], answers[2];
  CHECK(pipe(names) == 0 && pipe(answers) == 0);
  pid_t child = fork_with_alarm();
  if (child == 0) {
    fd_server_name name = offer(0, 7), nobody;
    int next = dup(0), after = dup(0); /* the asker's socket, and the file */
    CHECK(next >= 0 && after >= 0);
    close(next);
    close(after);
    struct rlimit limit = {(rlim_t)after + 1, (rlim_t)after + 1};
    CHECK_IS(setrlimit(RLIMIT_NOFILE, &limit), 0);
    send_name(names[1], name);
    receive(answers[0], &nobody);
    _exit(0);
  }
  fd_server_name name;
  receive(names[0], &name);
  for (int i = 0; i < 3; i++)
    CHECK_IS(take(name, 7), 0);
  send_name(answers[1], name);
  expect_success(child);
}

/* Root is somebody else, too; each side finds that out for itself. */
SCENARIO(users)
{
  fd_server_name name = offer(0, 1);
  if (geteuid() != 0)
    return;
  pid_t child = fork_with_alarm();
  if (child == 0) {
    CHECK_IS(setuid(65534), 0);
    for (int i = 0; i < 200; i++)
      CHECK_IS(take(name, 1), EACCES);
    _exit(0);
  }
  expect_success(child);
  int names[2];
  CHECK_IS(pipe(names), 0);
  child = fork_with_alarm();
  if (child == 0) {
    CHECK_IS(setuid(65534), 0);
    send_name(names[1], offer(0, 3));
    for (;;)
      pause();
  }
  receive(names[0], &name);
  CHECK_IS(take(name, 3), EACCES);
  kill(child, SIGKILL);
  waitpid(child, NULL, 0);
}

/* As in a container that has a network of its own. */
SCENARIO(network)
{
  fd_server_name name = offer(0, 1);
  pid_t child = fork_with_alarm();
  if (child == 0) {
    bool apart = unshare(CLONE_NEWNET) == 0; /* not everybody may */
    CHECK_IS(take(name, 1), apart ? ECONNREFUSED : 0);
    _exit(0);
  }
  expect_success(child);
}

/* ---- who asks badly -------------------------------------------------------- */

static int connect_only(fd_server_name name)
{
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int length =
      snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "esper_alloc-%llu-%016llx",
               (unsigned long long)name.process, (unsigned long long)name.key);
  int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  CHECK_IS(connect(s, (struct sockaddr *)&address,
                   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)),
           0);
  return s;
}

/* Who says nothing, says too little or goes does not keep the others. */
SCENARIO(silent)
{
  fd_server_name name = offer(0, 1);
  int silent = connect_only(name), brief = connect_only(name), gone = connect_only(name);
  CHECK_IS(send(brief, "ab", 2, 0), 2);
  CHECK(send(gone, &name.number, sizeof name.number, 0) > 0);
  close(gone);
  double began = now();
  CHECK_IS(take(name, 1), 0);
  CHECK(now() - began < 8);
  close(silent);
  close(brief);
}

static void *take_often(void *name)
{
  for (int i = 0; i < 20; i++)
    CHECK_IS(take(*(fd_server_name *)name, 9), 0);
  return NULL;
}

/* More at once than wait in line. */
SCENARIO(crowd)
{
  enum { MANY = 200 };
  static pthread_t threads[MANY];
  fd_server_name name = offer(0, 9);
  for (int i = 0; i < MANY; i++)
    CHECK_IS(pthread_create(&threads[i], NULL, take_often, &name), 0);
  for (int i = 0; i < MANY; i++)
    pthread_join(threads[i], NULL);
}

static void note_signal(int number)
{
  (void)number;
}

SCENARIO(signals)
{
  struct sigaction action = {.sa_handler = note_signal};
  struct itimerval often = {{0, 2000}, {0, 2000}};
  sigset_t before, after;
  sigaction(SIGALRM, &action, NULL);
  setitimer(ITIMER_REAL, &often, NULL);
  sigprocmask(SIG_BLOCK, NULL, &before);
  for (uint64_t i = 1; i <= 3; i++)
    CHECK_IS(take(offer(200, i), i), 0);
  sigprocmask(SIG_BLOCK, NULL, &after);
  CHECK_IS(sigismember(&after, SIGALRM), sigismember(&before, SIGALRM));
}

/* The socket is the last file that there is room for. */
SCENARIO(full_table)
{
  int names[2];
  CHECK_IS(pipe(names), 0);
  pid_t child = fork_with_alarm();
  if (child == 0) {
    fd_server_name name;
    receive(names[0], &name);
    int next = dup(0);
    close(next);
    struct rlimit limit = {(rlim_t)next + 1, (rlim_t)next + 1};
    CHECK_IS(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_IS(take(name, 5), EMFILE);
    CHECK_IS(dup(0), next); /* nothing is left open */
    CHECK_IS(take(name, 5), EMFILE);
    _exit(0);
  }
  send_name(names[1], offer(0, 5));
  expect_success(child);
}

/* ---- the process forks, and ends --------------------------------------------- */

static void *take_slowly(void *name)
{
  CHECK_IS(take(*(fd_server_name *)name, 1), 0);
  return NULL;
}

/* A child has nothing of it, whatever its parent's thread was at, and can begin anew. */
SCENARIO(fork)
{
  int files = open_files();
  fd_server_name name;
  pthread_t thread;
  CHECK_IS(fd_server_offer(open_when_told, 0, 1, -1, &name), 0);
  CHECK_IS(pthread_create(&thread, NULL, take_slowly, &name), 0);
  while (!atomic_load(&being_asked))
    usleep(1000);
  pid_t child = fork_with_alarm();
  atomic_store(&may_answer, true);
  if (child == 0) {
    CHECK_IS(open_files(), files + 1); /* of who takes */
    fd_server_withdraw(name.number);
    fd_server_name mine = offer(0, 2);
    CHECK_IS(take(mine, 2), 0);
    CHECK_IS(take(name, 1), 0); /* the parent's, from the parent */
    exit(0);
  }
  expect_success(child);
  pthread_join(thread, NULL);
  CHECK_IS(take(name, 1), 0);
}

/* Nobody waits for an answer of a child whose parent, which had one, is gone. */
SCENARIO(orphan)
{
  int names[2], taken[2], ends[2]; /* nothing is written to the last: its end is this process's */
  fd_server_name name;
  CHECK_IS(pipe(names), 0);
  CHECK_IS(pipe(taken), 0);
  CHECK_IS(pipe(ends), 0);
  pid_t parent = fork_with_alarm();
  if (parent == 0) {
    name = offer(0, 1);
    close(ends[1]);
    char nothing;
    if (fork_with_alarm() == 0) {
      send_name(names[1], name);
      _exit((int)read(ends[0], &nothing, 1));
    }
    _exit(read(taken[0], &nothing, 1) != 1);
  }
  receive(names[0], &name);
  CHECK_IS(take(name, 1), 0);
  CHECK_IS(write(taken[1], "", 1), 1);
  expect_success(parent);
  double began = now();
  CHECK_IS(take(name, 1), ECONNREFUSED);
  CHECK(now() - began < 5);
}

static int exiting[2];

/* Stands for a library that was there at the first offer, and goes. */
static void leave(void)
{
  fd_server_name nobody = {0};
  send_name(exiting[1], nobody);
  sleep(2);
}

SCENARIO(exit)
{
  int names[2];
  fd_server_name name, nobody;
  CHECK(pipe(names) == 0 && pipe(exiting) == 0);
  pid_t child = fork_with_alarm();
  if (child == 0) {
    atexit(leave);
    send_name(names[1], offer(0, 1));
    exit(0);
  }
  receive(names[0], &name);
  receive(exiting[0], &nobody);
  CHECK_IS(take(name, 1), ECONNREFUSED);
  expect_success(child);
}
