#include "monotonic.h"

#include <stdatomic.h>
#include <time.h>

static _Atomic uint64_t skipped, stopped_at; /* 0: it runs */

uint64_t monotonic_now(void)
{
  uint64_t time = atomic_load_explicit(&stopped_at, memory_order_relaxed);
  if (!time) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    time = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
  }
  return time + atomic_load_explicit(&skipped, memory_order_relaxed);
}

void monotonic_stop(void)
{
  atomic_store(&stopped_at, monotonic_now() - atomic_load(&skipped));
}

void monotonic_skip(uint64_t microseconds)
{
  atomic_fetch_add(&skipped, microseconds);
}
