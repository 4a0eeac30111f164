/* exchange.h: a world with a black box, and threads that free each other's memory. */
#ifndef ESPER_TEST_EXCHANGE_H
#define ESPER_TEST_EXCHANGE_H

#include <pthread.h>

#include "black_box/recorder.h"
#include "draw.h"
#include "one_world.h"

/* The oracle knows no other threads' mallocs. */
static inline void begin_without_oracle(size_t bytes)
{
  begin_on((sim_options){0}, NULL);
  box_reset();
  box_begin(w.core, bytes);
}

static inline void finish(void)
{
  CHECK(box_is_valid());
  box_end();
  end();
}

enum { KEPT = 64, THREADS = 4, ROUNDS = 20000 };

static void *shared[KEPT];

static void *exchange(void *number)
{
  uint64_t state = (uintptr_t)number;
  for (int i = 0; i < ROUNDS; i++) {
    void *p;
    CHECK_OK(
        esper_malloc(w.core, 512 * (1 + draw_below(&state, 9)), w.stream[(uintptr_t)number], &p));
    p = __atomic_exchange_n(&shared[draw_below(&state, KEPT)], p, __ATOMIC_ACQ_REL);
    CHECK_OK(esper_free(w.core, p));
  }
  return NULL;
}

static inline void start_exchange(pthread_t threads[THREADS])
{
  memset(shared, 0, sizeof shared);
  for (uintptr_t i = 0; i < THREADS; i++)
    CHECK_EQ(pthread_create(&threads[i], NULL, exchange, (void *)i), 0);
}

static inline void join_exchange(const pthread_t threads[THREADS])
{
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
}

#endif
