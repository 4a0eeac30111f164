#include "cache_latch.h"

__attribute__((noinline)) bool cache_enter_slowly(block_cache_t *cache, int to)
{
  for (int turn = 0;; turn++) {
    /* A thread that finds the latch closed sees what its holders did. */
    int state = atomic_load_explicit(&cache->latch, memory_order_acquire);
    if (state == LATCH_CLOSED)
      return false;
    if (state == LATCH_OPEN && cache_latch_change(cache, LATCH_OPEN, to))
      return true;
    wait_briefly(turn);
  }
}

void caches_pause(const device_t *device)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    cache_pause(&heap->cache);
}

void caches_resume(const device_t *device)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    cache_resume(&heap->cache);
}
