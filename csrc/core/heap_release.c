/* heap_release.c: segments that nobody uses go back to the driver. */
#include "heap.h"

#include "config.h"
#include "free_blocks.h"
#include "front.h"
#include "pool.h"
#include "record.h"
#include "seal.h"
#include "segment.h"
#include "stream.h"
#include "use.h"

static bool is_wholly_free(const segment_t *s)
{
  const block_t *block = s->first;
  return !block->next && (block->state == BLOCK_READY || block->state == BLOCK_PENDING);
}

static bool is_idle(const segment_t *s)
{
  const block_t *block = s->first;
  if (s->pinned) /* whoever knows its address may still be using it */
    return false;
  if (!is_wholly_free(s))
    return false;
  if (s->captured && !RULE(GRAPHS_KEEP_MEMORY))
    return true;
  return pool_may_give_back(s) &&
         ((uses_have_completed(block) && owner_order_has_completed(block)) ||
          !RULE(RELEASE_NEEDS_COMPLETION));
}

static segment_t *idle_segment(device_t *device, const pool_t *pool, const pool_t *but)
{
  fronts_close(device);
  for (segment_t *s = device->first_segment; s; s = s->next)
    if ((!pool || s->heap->pool == pool) && s->heap->pool != but && is_idle(s))
      return s;
  return NULL;
}

/* An idle segment goes back: looked up under the lock, which is dropped. What it
 * held; 0: there was none, or the driver did not take it. */
static size_t give_back(device_t *device, segment_t *segment)
{
  block_t *block = segment ? segment->first : NULL;
  if (block) {
    free_blocks_claim(block);
    free_blocks_satisfied(block);
    pool_enter(segment->heap->pool);
  }
  pool_t *of = block ? segment->heap->pool : NULL;
  size_t size = block ? block->size : 0;
  unlock(&device->lock);
  bool gone = block && segment_release(device, block);
  lock(&device->lock);
  if (of)
    pool_leave(of);
  pool_collect(device);
  unlock(&device->lock);
  pool_bury(device);
  return gone ? size : 0;
}

size_t heap_release(device_t *device, const pool_t *pool, const pool_t *but, size_t enough)
{
  size_t released = 0, last = 1;
  seal_released(device, pool);
  while (last && released < enough) {
    lock(&device->lock);
    last = give_back(device, idle_segment(device, pool, but));
    released += last;
  }
  return released;
}

/* ---- before memory grows ------------------------------------------------- */

/* Bytes reserved beyond the threshold. */
static size_t excess(const device_t *device)
{
  double share = config_of(device->core)->as_given.garbage_collection_threshold;
  size_t reserved = (size_t)device->stats.reserved_bytes[ESPER_ALL].current;
  size_t most = (size_t)(share * (double)device->limit);
  return share > 0 && device->limit && reserved > most ? reserved - most : 0;
}

static bool is_cached(const segment_t *s)
{
  return s->large && s->heap->pool == &s->device->default_pool && is_wholly_free(s);
}

/* That an old segment's own stream is done with it is known once somebody has
 * asked: one event for each stream. A busy one answers the next time. */
static void ask_owners(device_t *device)
{
  enum { MOST = 8 };
  struct {
    stream_t *stream;
    uint64_t stamp;
  } asked[MOST];
  int count = 0;
  lock(&device->lock);
  for (const segment_t *s = device->first_segment; s; s = s->next) {
    if (!is_cached(s) || s->heap->capture || owner_order_has_completed(s->first))
      continue;
    int i = 0;
    while (i < count && asked[i].stream != s->heap->stream)
      i++;
    if (i == MOST)
      continue;
    if (i == count) {
      asked[count].stream = s->heap->stream;
      asked[count++].stamp = 0;
    }
    if (s->first->stamp > asked[i].stamp)
      asked[i].stamp = s->first->stamp;
  }
  unlock(&device->lock);
  for (int i = 0; i < count; i++) {
    record_t *record = stream_probe(asked[i].stream, asked[i].stamp);
    if (record) {
      stream_completes_now(asked[i].stream, record->number);
      record_drop(record);
    }
  }
  stream_retire_all(device->core);
}

static segment_t *longest_unused(const device_t *device)
{
  segment_t *found = NULL;
  for (segment_t *s = device->first_segment; s; s = s->next)
    if (is_cached(s) && is_idle(s) && (!found || s->used_at < found->used_at))
      found = s;
  return found;
}

/* Nobody waits: what has not completed stays, for the next time. */
void heap_collect(device_t *device)
{
  size_t wanted, released = 0, last = 1;
  lock(&device->lock);
  wanted = device->openings ? 0 : excess(device); /* a capture may be going on */
  unlock(&device->lock);
  if (!wanted)
    return;
  ask_owners(device);
  while (last && released < wanted) {
    lock(&device->lock);
    fronts_close(device);
    last = give_back(device, longest_unused(device));
    released += last;
  }
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
