/* check.h: a small test harness.
 *
 *   TEST(queues_are_first_in_first_out) { CHECK(...); }
 *   SCENE(memory_comes_back) { CHECK(...); }
 *
 * Tests register themselves. A program runs the tests that its arguments name, or all of them, and
 * prints their names; --list only prints them. The first failed check ends the program with status
 * 1 and prints its place. */
#ifndef ESPER_CHECK_H
#define ESPER_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "esper_alloc.h"

typedef struct check_test {
  const char *name;
  void (*run)(void);
  struct check_test *next;
} check_test;

void check_register(check_test *test);
_Noreturn void check_failed(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Every test of the program, in order. */
const check_test *check_first(void);
/* Runs a test silently in a process of its own; returns whether it passed. */
int check_passes(const check_test *test);

/* Runs the function in a process of its own; returns whether it aborted with `message` on its
 * standard error. */
int check_aborts(void (*run)(void), const char *message);
/* Runs the function on another thread and waits for it, for hooks in which another thread does
 * something meanwhile. */
void check_on_another_thread(void (*run)(void *context), void *context);

/* Makes host memory run out after `calls` more calls of malloc, realloc, aligned_alloc and mmap;
 * -1: never. */
void check_limit_malloc(long calls);
/* Makes one call fail after so many more of these and of calloc, which the simulated device cannot
 * go on without. */
void check_fail_malloc(long calls);

/* The value of the expression where host memory runs out after `calls` more of them. */
#define WITH_MALLOCS(calls, expression)            \
  ({                                               \
    check_limit_malloc(calls);                     \
    __typeof__(expression) check_v = (expression); \
    check_limit_malloc(-1);                        \
    check_v;                                       \
  })

#define TEST(name)                                               \
  static void name(void);                                        \
  __attribute__((constructor)) static void register_##name(void) \
  {                                                              \
    static check_test test = {#name, name, NULL};                \
    check_register(&test);                                       \
  }                                                              \
  static void name(void)

/* A test that runs between begin() and end(), or another beginning and end(), of its file. */
#define SCENE(name) SCENE_WITH(name, begin())
#define SCENE_WITH(name, beginning) \
  static void name##_scene(void);   \
  TEST(name)                        \
  {                                 \
    beginning;                      \
    name##_scene();                 \
    end();                          \
  }                                 \
  static void name##_scene(void)

#define CHECK(x) ((x) ? (void)0 : check_failed(__FILE__, __LINE__, "%s", #x))

#define CHECK_EQ(a, b)                                                                       \
  do {                                                                                       \
    long long check_a = (long long)(a), check_b = (long long)(b);                            \
    if (check_a != check_b)                                                                  \
      check_failed(__FILE__, __LINE__, "%s is %lld, not %s, which is %lld", #a, check_a, #b, \
                   check_b);                                                                 \
  } while (0)

#define CHECK_OK(status)                                                                   \
  do {                                                                                     \
    esper_status check_s = (status);                                                       \
    if (check_s != ESPER_OK)                                                               \
      check_failed(__FILE__, __LINE__, "%s: %s (%s)", #status, esper_status_name(check_s), \
                   esper_last_error());                                                    \
  } while (0)

#define CHECK_STATUS(status, expected)                                                        \
  do {                                                                                        \
    esper_status check_s = (status);                                                          \
    if (check_s != (expected))                                                                \
      check_failed(__FILE__, __LINE__, "%s: %s, not %s", #status, esper_status_name(check_s), \
                   #expected);                                                                \
  } while (0)

/* A call that is refused, and says why. */
#define CHECK_REFUSED(status, expected, words) \
  do {                                         \
    CHECK_STATUS(status, expected);            \
    CHECK(strstr(esper_last_error(), words));  \
  } while (0)

#endif
