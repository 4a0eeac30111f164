#include "monotonic.h"

#include <stdatomic.h>
#include <time.h>

static _Atomic uint64_t stopped_at; /* 0: it runs */

uint64_t monotonic_now(void)
{
  struct timespec now;
  uint64_t stopped = atomic_load_explicit(&stopped_at, memory_order_relaxed);
  clock_gettime(CLOCK_MONOTONIC, &now);
  return stopped ? stopped : (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

void monotonic_skip(uint64_t microseconds)
{
  uint64_t running = 0;
  atomic_compare_exchange_strong(&stopped_at, &running, monotonic_now());
  atomic_fetch_add(&stopped_at, microseconds);
}
