#include "dump.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "recorder.h"

/* From a signal's handler as well. */
int dump_to(const char *path, const char *why, const char *info, bool urgent)
{
  static const char suffix[] = ".part";
  char part[DUMP_PATH + sizeof suffix];
  size_t length = strlen(path);
  if (length >= DUMP_PATH)
    return ENAMETOOLONG;
  memcpy(part, path, length);
  memcpy(part + length, suffix, sizeof suffix);
  unlink(part); /* of a process that died */
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

const char *dump_oom(void)
{
  enum { APART = 10 };
  static _Atomic int64_t last;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int64_t before = atomic_load(&last), seconds = (int64_t)now.tv_sec + APART;
  if (!*oom_path || !box_stats().on || (before && seconds - before < APART) ||
      !atomic_compare_exchange_strong(&last, &before, seconds))
    return NULL;
  return dump_to(oom_path, "out of memory", NULL, false) == 0 ? oom_path : NULL;
}

/* ---- signals ---------------------------------------------------------------------- */

static char signal_path[DUMP_PATH];
static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
enum { FATAL = sizeof fatal / sizeof *fatal };
static struct sigaction before[FATAL];

static void write_at_signal(int number)
{
  char why[] = "signal \0\0";
  char *digit = why + strlen(why);
  if (number >= 10)
    *digit++ = (char)('0' + number / 10);
  *digit = (char)('0' + number % 10);
  dump_to(signal_path, why, NULL, true);
}

static void asked(int number)
{
  int error = errno;
  write_at_signal(number);
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

int dump_at_signals(const char *path)
{
  static atomic_bool installed;
  int error = keep_path(signal_path, path);
  if (error || atomic_exchange(&installed, true))
    return error;
  struct sigaction by_request = {.sa_handler = asked, .sa_flags = SA_RESTART};
  struct sigaction by_fault = {.sa_sigaction = dies, .sa_flags = SA_ONSTACK | SA_SIGINFO};
  if (sigaction(SIGUSR2, &by_request, NULL) < 0)
    return errno;
  for (int i = 0; i < FATAL; i++)
    if (sigaction(fatal[i], &by_fault, &before[i]) < 0)
      return errno;
  return 0;
}
