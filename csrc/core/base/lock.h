/* lock.h: a mutex of one word, and a latch. The mutex is taken and released inline:
 * malloc and free hold it for about twenty nanoseconds, so a library call would be noticed. A
 * thread that finds it held spins briefly, then sleeps. */
#ifndef ESPER_LOCK_H
#define ESPER_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>

#include "lock_order.h"

enum { LOCK_FREE, LOCK_HELD, LOCK_AWAITED };

typedef struct mutex {
  atomic_int state;
#ifdef ESPER_LOCK_ORDER
  lock_rank rank;
#endif
} mutex_t;

/* lock_order.h says what the rank means. */
static inline void mutex_init(mutex_t *mutex, lock_rank rank)
{
  atomic_init(&mutex->state, LOCK_FREE);
#ifdef ESPER_LOCK_ORDER
  mutex->rank = rank;
#else
  (void)rank;
#endif
}

/* A lock that is held for about ten nanoseconds: no thread sleeps on it, and leaving it is a plain
 * store. A thread takes no lock while it holds one. Zero is open. */
typedef struct latch {
  atomic_bool held;
} latch_t;

/* For loops that wait for a latch; `turn` counts the calls. */
void wait_briefly(int turn);

void lock_slowly(mutex_t *mutex);
void unlock_and_wake(mutex_t *mutex);

static inline void lock(mutex_t *mutex)
{
  int state = LOCK_FREE;
  lock_order_take(mutex->rank);
  if (!atomic_compare_exchange_strong_explicit(&mutex->state, &state, LOCK_HELD,
                                               memory_order_acquire, memory_order_relaxed))
    lock_slowly(mutex);
}

static inline void unlock(mutex_t *mutex)
{
  lock_order_leave(mutex->rank);
  if (atomic_exchange_explicit(&mutex->state, LOCK_FREE, memory_order_release) == LOCK_AWAITED)
    unlock_and_wake(mutex);
}

static inline bool latch_try(latch_t *latch)
{
  return !atomic_load_explicit(&latch->held, memory_order_relaxed) &&
         !atomic_exchange_explicit(&latch->held, true, memory_order_acquire);
}

static inline void latch_take(latch_t *latch)
{
  lock_order_take(LOCK_CREDIT);
  for (int turn = 0; !latch_try(latch); turn++)
    wait_briefly(turn);
}

static inline void latch_leave(latch_t *latch)
{
  lock_order_leave(LOCK_CREDIT);
  atomic_store_explicit(&latch->held, false, memory_order_release);
}

#endif
