/* heap_release.c: segments that nobody uses go back to the driver. */
#include "heap.h"

#include "free_blocks.h"
#include "front.h"
#include "pool.h"
#include "seal.h"
#include "segment.h"
#include "stream.h"
#include "use.h"

static bool is_idle(const segment_t *s)
{
  if (s->pinned)
    return false; /* whoever knows its address may still be using it */
  const block_t *block = s->first;
  if (block->next || (block->state != BLOCK_READY && block->state != BLOCK_PENDING))
    return false;
  if (s->captured && !RULE(GRAPHS_KEEP_MEMORY))
    return true;
  return pool_may_give_back(s) &&
         ((uses_have_completed(block) && owner_order_has_completed(block)) ||
          !RULE(RELEASE_NEEDS_COMPLETION));
}

static block_t *claim_idle_segment(device_t *device, const pool_t *pool, const pool_t *but)
{
  fronts_close(device);
  for (segment_t *s = device->first_segment; s; s = s->next)
    if ((!pool || s->heap->pool == pool) && s->heap->pool != but && is_idle(s)) {
      free_blocks_claim(s->first);
      free_blocks_satisfied(s->first);
      pool_enter(s->heap->pool);
      return s->first;
    }
  return NULL;
}

size_t heap_release(device_t *device, const pool_t *pool, const pool_t *but, size_t enough)
{
  size_t released = 0;
  bool going = true;
  seal_released(device, pool);
  while (going && released < enough) {
    lock(&device->lock);
    block_t *block = claim_idle_segment(device, pool, but);
    pool_t *of = block ? block->segment->heap->pool : NULL;
    size_t size = block ? block->size : 0;
    unlock(&device->lock);
    going = block && segment_release(device, block);
    if (going)
      released += size;
    lock(&device->lock);
    if (of)
      pool_leave(of);
    pool_collect(device);
    unlock(&device->lock);
    pool_bury(device);
  }
  return released;
}

void heap_retire(device_t *device)
{
  stream_retire_all(device->core);
  lock(&device->lock);
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap; heap = heap->next)
      free_blocks_promote(heap);
  unlock(&device->lock);
}
