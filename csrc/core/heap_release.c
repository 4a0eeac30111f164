/* heap_release.c: memory that nobody uses goes back to the driver: whole classic
 * segments, and of mapped ones any pages. */
#include "heap.h"

#include "block.h"
#include "config.h"
#include "free_blocks.h"
#include "front.h"
#include "opening.h"
#include "loose.h"
#include "mapped.h"
#include "page.h"
#include "pool.h"
#include "record.h"
#include "seal.h"
#include "segment.h"
#include "stream.h"
#include "use.h"

static bool is_free(const block_t *block)
{
  return block->state == BLOCK_READY || block->state == BLOCK_PENDING;
}

static bool is_idle(const block_t *block)
{
  const segment_t *s = block->segment;
  if (s->pinned) /* whoever knows its address may still be using it */
    return false;
  if (!is_free(block))
    return false;
  if (s->captured && !RULE(GRAPHS_KEEP_MEMORY))
    return true;
  bool completed = uses_have_completed(block) && owner_order_has_completed(block);
  return pool_may_give_back(s) &&
         (completed || !(s->pages ? RULE(UNMAP_NEEDS_COMPLETION) : RULE(RELEASE_NEEDS_COMPLETION)));
}

/* Whole pages of an idle block, and on how many sides of them memory stays. */
typedef struct pages {
  block_t *block;
  uintptr_t first;
  size_t size;
  int beside;
} pages_t;

static int count_beside(const pages_t *p)
{
  const block_t *b = p->block;
  return (p->first > b->address || (b->prev && block_is_mapped(b->prev))) +
         (p->first + p->size < b->address + b->size || (b->next && block_is_mapped(b->next)));
}

/* Of a mapped segment: what leaves the fewest holes, if that is fewer than `best` does. */
static void find_pages(const segment_t *s, size_t enough, pages_t *best)
{
  for (block_t *b = s->first; b && (!best->block || best->beside); b = b->next) {
    pages_t found = {.block = b};
    found.size = is_idle(b) ? pages_within(b, enough, SIZE_MAX, false, &found.first) : 0;
    if (!found.size)
      continue;
    found.beside = count_beside(&found);
    if (!best->block || found.beside < best->beside)
      *best = found;
  }
}

static block_t *claim_segment(segment_t *s)
{
  free_blocks_claim(s->first);
  free_blocks_satisfied(s->first);
  return s->first;
}

/* Whole stretches of memory go first, and what would part one goes last: so few holes are
 * left, and on the way there are never more stretches than before and after. */
static block_t *claim_idle(device_t *device, const pool_t *pool, bool mind_captures,
                           size_t enough)
{
  pages_t best = {0};
  const pool_t *but = /* looked at each time: a capture may have begun since */
      mind_captures && opening_may_capture(device) ? &device->default_pool : NULL;
  fronts_close(device);
  for (segment_t *s = device->first_segment; s; s = s->next) {
    if ((pool && s->heap->pool != pool) || s->heap->pool == but)
      continue;
    if (s->pages)
      find_pages(s, enough, &best);
    else if (!s->first->next && is_idle(s->first))
      return claim_segment(s);
  }
  return best.block ? mapped_carve(best.block, best.first, best.size) : NULL;
}

/* What was claimed goes back: a classic segment, or pages. Under the lock, which is
 * dropped. The bytes that went; 0: there was nothing, or the driver did not take it. */
static size_t give_back(device_t *device, block_t *block)
{
  size_t size = block ? block->size : 0;
  pool_t *of = block ? block->segment->heap->pool : NULL;
  if (of)
    pool_enter(of);
  unlock(&device->lock);
  if (block && block->segment->pages)
    size = mapped_unmap(device, block);
  else if (block && !segment_release(device, block))
    size = 0;
  lock(&device->lock);
  if (of)
    pool_leave(of);
  unlock(&device->lock);
  return size;
}

/* Of one block; 0: none that would go. */
static size_t release_some(device_t *device, const pool_t *pool, bool mind_captures,
                           size_t enough)
{
  /* Or pages that moved would stay mapped where they were, and take room. */
  lock(&device->lock);
  while (mapped_has_reapable(device)) {
    unlock(&device->lock);
    if (!mapped_reap(device))
      return 0;
    lock(&device->lock);
  }
  return give_back(device, claim_idle(device, pool, mind_captures, enough));
}

size_t heap_release(device_t *device, const pool_t *pool, bool mind_captures, size_t enough)
{
  size_t released = loose_give_back(device), size = 1;
  seal_released(device, pool);
  while (size && released < enough)
    released += size = release_some(device, pool, mind_captures, enough - released);
  while (mapped_discard_empty(device, pool))
    ;
  lock(&device->lock);
  pool_collect(device);
  unlock(&device->lock);
  pool_bury(device);
  return released;
}

/* ---- before memory grows ------------------------------------------------- */

/* Bytes reserved beyond the threshold. */
static size_t excess(const device_t *device)
{
  double share = config_of(device->core)->as_given.garbage_collection_threshold;
  size_t reserved = (size_t)device->stats.reserved_bytes[ESPER_ALL].current;
  if (share <= 0 || device->limit == SIZE_MAX)
    return 0;
  size_t most = (size_t)(share * (double)device->limit);
  return reserved > most ? reserved - most : 0;
}

/* Memory of mapped segments stays, as in PyTorch: it is what the next request grows by,
 * wherever it lies. */
static bool is_cached(const segment_t *s)
{
  return s->large && !s->pages && s->heap->pool == &s->device->default_pool &&
         !s->first->next && is_free(s->first);
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
  fronts_close(device);
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

static double age_of(const segment_t *s)
{
  return (double)(s->device->large_requests - s->used_at);
}

/* What is cached goes in rounds: what is as old as it is on average, or older.
 * Negative: nothing could go. */
static double average_age(device_t *device)
{
  double sum = 0, count = 0;
  lock(&device->lock);
  fronts_close(device);
  for (const segment_t *s = device->first_segment; s; s = s->next)
    if (is_cached(s) && is_idle(s->first)) {
      sum += age_of(s);
      count++;
    }
  unlock(&device->lock);
  return count > 0 ? sum / count : -1;
}

/* Bytes that went; 0: nothing is so old. */
static size_t give_back_one(device_t *device, double age)
{
  lock(&device->lock);
  fronts_close(device);
  segment_t *s = opening_may_capture(device) ? NULL : device->first_segment;
  while (s && !(is_cached(s) && is_idle(s->first) && age_of(s) >= age))
    s = s->next;
  return give_back(device, s ? claim_segment(s) : NULL);
}

/* Nobody waits: what has not completed stays, for the next time. */
void heap_collect(device_t *device)
{
  lock(&device->lock);
  size_t wanted = opening_may_capture(device) ? 0 : excess(device);
  unlock(&device->lock);
  if (!wanted)
    return;
  ask_owners(device);
  size_t released = 0, before;
  do {
    before = released;
    double age = average_age(device);
    for (size_t one = 1; one && age >= 0;)
      released += one = give_back_one(device, age);
  } while (released > before && released < wanted);
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
