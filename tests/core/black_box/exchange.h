/* exchange.h: threads that free each other's memory. Included after draw.h and one_world.h. */
#ifndef ESPER_TEST_EXCHANGE_H
#define ESPER_TEST_EXCHANGE_H

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

#endif
