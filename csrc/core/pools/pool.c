#include "pool.h"

#include <stdlib.h>
#include <string.h>

#include "../base/call.h"
#include "../base/core_assert.h"
#include "../blocks/block_cache.h"
#include "../blocks/free_blocks.h"
#include "../order/capture.h"
#include "../order/retire.h"
#include "../order/stream.h"
#include "../stats/stat_shard.h"
#include "source.h"

/* ---- pools ------------------------------------------------------------- */

void pool_init(pool_t *pool, device_t *device, uint64_t id_first, uint64_t id_second)
{
  *pool = (pool_t){.device = device,
                   .id = {id_first, id_second},
                   .references = 1,
                   .next = device->pools};
  device->pools = pool;
}

pool_t *pool_find(device_t *device, uint64_t id_first, uint64_t id_second)
{
  pool_t *pool = device->pools;
  while (pool && (pool->id[0] != id_first || pool->id[1] != id_second))
    pool = pool->next;
  return pool;
}

static pool_t *make_pool(device_t *device, uint64_t id_first, uint64_t id_second)
{
  pool_t *pool = malloc(sizeof *pool);
  if (pool)
    pool_init(pool, device, id_first, id_second);
  return pool;
}

pool_t *pool_refer(device_t *device, uint64_t id_first, uint64_t id_second)
{
  pool_t *pool = pool_find(device, id_first, id_second);
  if (pool)
    pool->references++;
  else
    pool = make_pool(device, id_first, id_second);
  return pool;
}

void pool_let_go(pool_t *pool)
{
  if (--pool->references == 0)
    pool_note_work(pool);
  pool_collect(pool->device);
}

void pool_enter(pool_t *pool)
{
  pool->busy++;
}

void pool_leave(pool_t *pool)
{
  pool->busy--;
}

/* A graph that was just destroyed may still be running, on any stream. */
void pool_note_work(pool_t *pool)
{
  stream_t *all = pool->device->all_streams;
  pool->released = stream_stamp(all);
  atomic_store(&all->holds, true);
}

bool pool_has_memory(const pool_t *pool)
{
  for (const segment_t *s = pool->device->first_segment; s; s = s->next)
    if (s->heap->pool == pool)
      return true;
  return false;
}

/* Sets `idle` of all pools in one walk over the segments, because there may be many pools. */
static void find_idle(device_t *device)
{
  bool any = false;
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    any |= pool->idle = !pool->references && !pool->busy && !pool->open;
  for (const segment_t *s = any ? device->first_segment : NULL; s; s = s->next)
    s->heap->pool->idle = false;
}

void pool_collect(device_t *device)
{
  find_idle(device);
  for (pool_t **link = &device->pools; *link;) {
    pool_t *pool = *link;
    if (!pool->idle) {
      link = &pool->next;
    } else {
      *link = pool->next;
      pool_destroy_heaps(pool);
      pool->next = device->gone_pools;
      device->gone_pools = pool;
    }
  }
}

void pool_bury(device_t *device)
{
  lock(&device->lock);
  pool_t *pool = device->gone_pools;
  device->gone_pools = NULL;
  unlock(&device->lock);
  for (pool_t *next; pool; pool = next) {
    next = pool->next;
    source_drop(pool);
    free(pool);
  }
}

/* Whether it may go back to its source (source.h): the driver, or a MemPool's own allocator. A
 * private pool keeps its memory while anybody refers to it, as with PyTorch's own allocator.
 * Graphs touch that memory, graphs of a tree even what none of them was handed, and network
 * libraries know its addresses. */
bool pool_may_give_back(const segment_t *segment)
{
  const pool_t *pool = segment->heap->pool;
  if (pool->open)
    return false;
  if (!pool->references)
    return stream_completed(pool->device->all_streams, pool->released) ||
           !RULE(RELEASE_NEEDS_COMPLETION);
  if (pool != pool->device->default_pool && RULE(GRAPHS_KEEP_MEMORY))
    return false;
  return !segment->captured && !segment->heap->capture;
}

bool pool_has_graphs(const pool_t *pool)
{
  bool has = pool->checkpointed;
  for (const heap_t *heap = pool->heaps; heap && !has; heap = heap->next)
    has = heap->capture != 0;
  for (const segment_t *s = pool->device->first_segment; s && !has; s = s->next)
    has = s->heap->pool == pool && s->captured;
  return has;
}

pool_t *pool_next_on_oom(device_t *device, pool_t *pool)
{
  lock(&device->lock);
  pool_t *next = pool ? pool->next : device->pools;
  /* An open pool may have been quiesced for a capture. */
  while (next && (!next->use_on_oom || next->open || !pool_has_memory(next) ||
                  (pool_has_graphs(next) && RULE(GRAPHS_KEEP_MEMORY))))
    next = next->next;
  if (next)
    pool_enter(next);
  if (pool) {
    pool_leave(pool);
    pool_collect(device);
  }
  unlock(&device->lock);
  pool_bury(device);
  return next;
}

/* ---- heaps ------------------------------------------------------------- */

_Static_assert(offsetof(heap_t, cache.latch) == 0, "heap_take clears what is behind the latch");

/* A spare heap's latch stays closed, because other threads may still try it: a free of a block that
 * has just changed its home, or a second free. */
static heap_t *heap_take(device_t *device)
{
  heap_t *heap = device->spare_heaps;
  if (!heap)
    return host_take(sizeof *heap);
  device->spare_heaps = heap->next;
  memset((char *)heap + sizeof heap->cache.latch, 0, sizeof *heap - sizeof heap->cache.latch);
  return heap;
}

/* Not inlined, so that pool_find_or_make_heap need not save registers for this. */
__attribute__((noinline)) static heap_t *make_heap(pool_t *pool, stream_t *stream, uint64_t capture,
                                                   tag_t tag)
{
  heap_t *heap = heap_take(pool->device);
  if (!heap)
    return NULL;
  cache_init(&heap->cache);
  heap->device = pool->device;
  heap->pool = pool;
  heap->pool_id = pool->id;
  heap->next_on_device = pool->device->heaps;
  if (heap->next_on_device)
    heap->next_on_device->previous_on_device = heap;
  pool->device->heaps = heap;
  heap->stream = stream;
  heap->capture = capture;
  heap->tag = tag;
  heap->ready[0].placed = heap->ready[1].placed = true;
  heap->next = pool->heaps;
  pool->heaps = heap;
  atomic_store_explicit(&stream->kept, true, memory_order_release);
  if (pool == pool->device->default_pool && !capture) {
    heap->cache.shard.number = atomic_fetch_add(&pool->device->credit.shards, 1);
    if (tag == TAG_NONE)
      atomic_store_explicit(&stream->heap, heap, memory_order_release);
  }
  return heap;
}

heap_t *pool_find_or_make_heap(pool_t *pool, stream_t *stream, uint64_t capture, tag_t tag)
{
  heap_t *quiesced = NULL;
  for (heap_t *heap = pool->heaps; heap; heap = heap->next) {
    if (heap->stream != stream || heap->tag != tag)
      continue;
    if (heap->capture == capture) {
      if (heap->quiesced && !pool_has_graphs(pool))
        free_blocks_release_withheld(heap);
      heap->quiesced = false;
      return heap;
    }
    if (heap->quiesced)
      quiesced = heap;
  }
  if (!quiesced)
    return make_heap(pool, stream, capture, tag);
  quiesced->capture = capture;
  quiesced->quiesced = false;
  return quiesced;
}

void pool_heap_leave_capture(heap_t *heap)
{
  heap->capture = 0;
  if (heap->branch)
    branch_drop(heap->branch);
  heap->branch = NULL;
}

void pool_destroy_heap(heap_t *heap)
{
  pool_heap_leave_capture(heap);
  heap_t **link = &heap->pool->heaps;
  while (*link != heap)
    link = &(*link)->next;
  *link = heap->next;
  device_t *device = heap->device;
  *(heap->previous_on_device ? &heap->previous_on_device->next_on_device : &device->heaps) =
      heap->next_on_device;
  if (heap->next_on_device)
    heap->next_on_device->previous_on_device = heap->previous_on_device;
  core_assert(cache_is_closed(&heap->cache)); /* and its latch stays so */
  shard_read(&heap->cache.shard, &device->stats);
  device->core->driver_calls[CALL_stream_capture] += atomic_load(&heap->cache.queries);
  heap->next = device->spare_heaps;
  device->spare_heaps = heap;
}

void pool_destroy_heaps(pool_t *pool)
{
  while (pool->heaps)
    pool_destroy_heap(pool->heaps);
}

/* ---- checking ---------------------------------------------------------- */

bool pool_is_valid(const pool_t *pool)
{
  bool valid = pool->references >= 0 && pool->busy >= 0;
  for (const heap_t *heap = pool->heaps; heap && valid; heap = heap->next) {
    valid = heap->pool == pool && heap_is_valid(heap) && !(heap->quiesced && heap->capture);
    for (const heap_t *other = heap->next; other && valid; other = other->next)
      valid = heap->stream != other->stream || heap->capture != other->capture ||
              heap->tag != other->tag;
  }
  return valid;
}

/* ---- retiring ------------------------------------------------------------ */

void pools_retire(device_t *device)
{
  stream_retire_all(device->core);
  lock(&device->lock);
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    free_blocks_promote(heap);
  unlock(&device->lock);
}
