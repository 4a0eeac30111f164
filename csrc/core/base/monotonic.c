#include "monotonic.h"

#include <stdatomic.h>
#include <time.h>

static _Atomic uint64_t skipped;

uint64_t monotonic_now(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u +
         atomic_load_explicit(&skipped, memory_order_relaxed);
}

void monotonic_skip(uint64_t microseconds)
{
  atomic_fetch_add(&skipped, microseconds);
}
