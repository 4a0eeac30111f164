/* lock.h: a mutex of one word, taken and released inline: malloc and free hold
 * it for some twenty nanoseconds, so calling a library would show. Who finds it
 * held spins for about as long as that, then sleeps. Zero is unlocked. */
#ifndef ESPER_LOCK_H
#define ESPER_LOCK_H

#include <stdatomic.h>

enum { LOCK_FREE, LOCK_HELD, LOCK_AWAITED };

typedef struct mutex {
  atomic_int state;
} mutex_t;

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

#endif
