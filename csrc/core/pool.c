#include "pool.h"

#include <stdlib.h>

void pool_init(pool_t *pool, device_t *device, uint64_t id_first, uint64_t id_second)
{
  *pool = (pool_t){.device = device, .id = {id_first, id_second}, .next = device->pools};
  device->pools = pool;
}

heap_t *pool_heap(pool_t *pool, stream_t *stream, uint64_t capture)
{
  heap_t *heap = pool->heaps;
  while (heap && (heap->stream != stream || heap->capture != capture))
    heap = heap->next;
  if (heap || !(heap = calloc(1, sizeof *heap)))
    return heap;
  heap->pool = pool;
  heap->stream = stream;
  heap->capture = capture;
  heap->next = pool->heaps;
  pool->heaps = heap;
  return heap;
}

void pool_destroy_heaps(pool_t *pool)
{
  while (pool->heaps) {
    heap_t *heap = pool->heaps;
    pool->heaps = heap->next;
    free(heap);
  }
}

bool heap_is_valid(const heap_t *heap)
{
  size_t pending = 0;
  for (const block_t *b = heap->oldest_pending; b; b = b->newer) {
    if (b->state != BLOCK_PENDING || b->segment->heap != heap ||
        (b->newer ? b->newer->older != b : heap->newest_pending != b))
      return false;
    pending++;
  }
  if (heap->warm && (heap->warm->state != BLOCK_WARM || heap->warm->uses ||
                     heap->warm->segment->heap != heap))
    return false;
  return pending == heap->pending[0].count + heap->pending[1].count &&
         bins_is_valid(&heap->ready[0]) && bins_is_valid(&heap->ready[1]) &&
         bins_is_valid(&heap->pending[0]) && bins_is_valid(&heap->pending[1]);
}
