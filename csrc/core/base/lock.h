/* lock.h: a mutex of one word, a latch, a bell. The mutex is taken and released
 * inline: malloc and free hold it for some twenty nanoseconds, so calling a library
 * would show. Who finds it held spins for about as long as that, then sleeps. Zero is
 * unlocked. */
#ifndef ESPER_LOCK_H
#define ESPER_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>

enum { LOCK_FREE, LOCK_HELD, LOCK_AWAITED };

typedef struct mutex {
  atomic_int state;
} mutex_t;

/* For what is held for some ten nanoseconds: nobody sleeps on it, and leaving it is a
 * plain store. Zero is open. */
typedef struct latch {
  atomic_bool held;
} latch_t;

/* What is rung for those who wait: they sleep until it was rung since they looked. */
typedef struct bell {
  atomic_int count, waiting;
} bell_t;

void bell_ring(bell_t *bell);
void bell_wait(bell_t *bell, int count);

static inline int bell_count(bell_t *bell)
{
  return atomic_load(&bell->count);
}

/* Called again and again by who waits for something so short. */
void wait_briefly(int turn);

void lock_slowly(mutex_t *mutex);
void unlock_and_wake(mutex_t *mutex);

static inline void lock(mutex_t *mutex)
{
  int state = LOCK_FREE;
  if (!atomic_compare_exchange_strong_explicit(&mutex->state, &state, LOCK_HELD,
                                               memory_order_acquire, memory_order_relaxed))
    lock_slowly(mutex);
}

static inline void unlock(mutex_t *mutex)
{
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
  for (int turn = 0; !latch_try(latch); turn++)
    wait_briefly(turn);
}

static inline void latch_leave(latch_t *latch)
{
  atomic_store_explicit(&latch->held, false, memory_order_release);
}

#endif
