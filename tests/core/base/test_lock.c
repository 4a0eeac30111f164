/* The mutex and the latch between threads. */
#include "core/base/lock.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>

#include "check.h"

enum { THREADS = 4, TIMES = 20000 };

static mutex_t mutex;
static latch_t latch;
static long plain; /* guarded by the lock in question */

static void run_threads(void *(*run)(void *), bool slowly)
{
  pthread_t threads[THREADS];
  plain = 0;
  for (int i = 0; i < THREADS; i++)
    CHECK_EQ(pthread_create(&threads[i], NULL, run, slowly ? &plain : NULL), 0);
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  CHECK_EQ(plain, (long)THREADS * TIMES);
}

/* Slowly: holds the mutex for longer than the others spin, so they sleep and have to be woken. */
static void *count_under_mutex(void *slowly)
{
  for (int i = 0; i < TIMES; i++) {
    lock(&mutex);
    long before = plain;
    if (slowly && i % 1000 == 0)
      sched_yield();
    plain = before + 1;
    unlock(&mutex);
  }
  return NULL;
}

TEST(a_mutex_is_held_by_one_thread_at_a_time)
{
  mutex_init(&mutex, LOCK_LEAF);
  run_threads(count_under_mutex, false);
  CHECK_EQ(atomic_load(&mutex.state), LOCK_FREE);
}

TEST(threads_that_sleep_on_a_mutex_are_woken)
{
  mutex_init(&mutex, LOCK_LEAF);
  run_threads(count_under_mutex, true);
}

static void *count_under_latch(void *unused)
{
  for (int i = 0; i < TIMES; i++) {
    latch_take(&latch);
    plain++;
    latch_leave(&latch);
  }
  return unused;
}

TEST(a_latch_is_held_by_one_thread_at_a_time)
{
  run_threads(count_under_latch, false);
  CHECK(latch_try(&latch));
  CHECK(!latch_try(&latch));
  atomic_store(&latch.held, false);
}
