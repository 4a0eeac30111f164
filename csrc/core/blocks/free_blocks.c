#include "free_blocks.h"

#include "../base/config.h"
#include "../base/core_assert.h"
#include "../stats/stats.h"
#include "block.h"
#include "block_cache.h"
#include "pending_index.h"
#include "trace.h"
#include "use.h"

void block_count_inactive(block_t *block)
{
  if (!block->counted_active)
    return;
  cache_count_satisfied(block);
  trace_add_block(block_device(block), ESPER_TRACE_FREE_COMPLETED, block, block->requested);
  block->counted_active = false;
  block->requested = 0;
}

/* A block that owes nothing but owner order is its stream's already. */
static void record_pending(const block_t *block, esper_action action)
{
  if (block->counted_active)
    trace_record(block_device(block), action, block->address, block->requested, block_user(block));
}

static void append_pending(heap_t *heap, block_t *block)
{
  block->older = heap->newest_pending;
  block->newer = NULL;
  *(block->older ? &block->older->newer : &heap->oldest_pending) = block;
  heap->newest_pending = block;
  /* Not in a capture, where no event stands for the replays. None stands for a point, either, which
   * keeps a block until a quiesce. Only a restored checkpoint leaves a point outside captures. */
  for (use_t *use = block->uses; use && !heap->capture; use = use->next)
    if (use_is_held(use))
      use_hold(use);
}

static void remove_pending(heap_t *heap, block_t *block)
{
  *(block->older ? &block->older->newer : &heap->oldest_pending) = block->newer;
  *(block->newer ? &block->newer->older : &heap->newest_pending) = block->older;
  block->older = block->newer = NULL;
}

static inline void insert(block_t *block, bins_t bins[2], block_state state)
{
  const segment_t *segment = block->segment;
  block_set_state(block, state);
  bins_insert(&bins[segment->large], block);
  if (block_counts_as_split(block))
    stats_split_added(&segment->device->stats, segment->large, block->size);
}

static void add_pending(block_t *block)
{
  heap_t *heap = block->segment->heap;
  insert(block, heap->pending, BLOCK_PENDING);
  append_pending(heap, block);
  pending_index_add(heap, block);
}

void free_blocks_claim(block_t *block)
{
  heap_t *heap = block->segment->heap;
  bool large = block->segment->large, ready = block->state == BLOCK_READY;
  /* Otherwise the bins would change under a malloc in the cache. */
  core_assert(!ready || cache_is_quiet(&heap->cache));
  bins_remove(ready ? &heap->ready[large] : &heap->pending[large], block);
  if (!ready) {
    remove_pending(heap, block);
    record_pending(block, ESPER_TRACE_AVAILABLE);
  }
  if (block_counts_as_split(block))
    stats_split_removed(&block_device(block)->stats, large, block->size);
  block_set_state(block, BLOCK_CLAIMED);
}

/* The heap's cache is quiet. */
static void add_ready(block_t *block)
{
  heap_t *heap = block->segment->heap;
  device_t *device = heap->device;
  block_count_inactive(block);
  if (block->next && block->next->state == BLOCK_READY) {
    free_blocks_claim(block->next);
    block_merge_next(device, block);
  }
  if (block->prev && block->prev->state == BLOCK_READY) {
    block = block->prev;
    free_blocks_claim(block);
    block_merge_next(device, block);
  }
  insert(block, heap->ready, BLOCK_READY);
}

static bool is_satisfied_at_home(const block_t *block)
{
  const heap_t *heap = block->segment->heap;
  if (block->withheld)
    return false;
  return heap->branch ? branch_is_after_all(heap->branch, block)
                      : uses_are_satisfied(block, heap->stream);
}

/* The heap's cache is quiet. */
static void add(block_t *block)
{
  heap_t *heap = block->segment->heap;
  if (block->uses)
    uses_drop_completed(heap->device, block);
  if (is_satisfied_at_home(block)) {
    add_ready(block);
    return;
  }
  if (!block_is_marked(block))
    block_count_inactive(block);
  add_pending(block);
  record_pending(block, ESPER_TRACE_PENDING);
}

void free_blocks_add(block_t *block)
{
  cache_close(block->segment->heap);
  add(block);
}

/* ---- the heap's cache -------------------------------------------------------- */

static void empty(block_cache_t *cache)
{
  cache_set_state(cache, CACHE_CLOSED);
  for (; cache->filled; cache->filled &= (uint16_t)(cache->filled - 1)) {
    int slot = __builtin_ctz(cache->filled);
    while (cache->count[slot]) {
      block_t *block = cache->block[slot][--cache->count[slot]];
      block_set_state(block, BLOCK_CLAIMED);
      block->requested = 0;
      add_ready(block);
    }
  }
  cache_renew(cache);
}

void cache_close(heap_t *heap)
{
  if (!cache_is_closed(&heap->cache))
    empty(&heap->cache);
}

void caches_close_pool(const device_t *device, const pool_t *pool)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    if (heap->pool == pool)
      cache_close(heap);
}

void caches_close(const device_t *device)
{
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    cache_close(heap);
}

void cache_open(heap_t *heap)
{
  if (!cache_is_closed(&heap->cache) || heap->capture || heap->pool != heap->device->default_pool ||
      heap->device->asleep[heap->tag] || device_has_failed(heap->device))
    return;
  cache_set_state(&heap->cache, heap->device->watch ? CACHE_LOCKED : CACHE_OPEN);
}

block_t *cache_take_or_close(heap_t *heap, size_t size, size_t requested, bool missed)
{
  block_cache_t *cache = &heap->cache;
  block_t *block = NULL;
  if (!missed && !cache_is_closed(cache)) {
    cache_pause(cache);
    block = cache_take(heap, size, requested);
    if (block)
      cache_count_allocated(block);
    else
      empty(cache);
    cache_resume(cache);
  } else {
    cache_close(heap);
  }
  return block;
}

static bool push(block_cache_t *cache, block_t *block)
{
  cache_pause(cache);
  bool kept = slots_push(cache, block);
  if (kept)
    block_set_state(block, BLOCK_CACHED);
  cache_resume(cache);
  return kept;
}

/* Puts a claimed block that owes no use into the cache. False: the cache must stay closed, or
 * cannot keep this block. */
static bool keep(block_t *block)
{
  heap_t *heap = block->segment->heap;
  if (!block->plain || !units_of(block->size))
    return false;
  cache_open(heap);
  if (cache_is_closed(&heap->cache))
    return false;
  if (push(&heap->cache, block))
    return true;
  cache_close(heap); /* its slots are full */
  cache_open(heap);
  return push(&heap->cache, block);
}

void free_blocks_cache(block_t *block)
{
  block_count_inactive(block);
  if (!keep(block))
    free_blocks_add(block);
}

void free_blocks_add_beside_cache(block_t *block)
{
  block_cache_t *cache = &block->segment->heap->cache;
  cache_pause(cache);
  add(block);
  cache_renew(cache);
  cache_resume(cache);
}

/* ---- pending blocks ---------------------------------------------------------- */

/* The marked uses of a pending block are over. */
static void count_unmarked(block_t *block)
{
  const segment_t *segment = block->segment;
  block_count_inactive(block);
  if (block_counts_as_split(block))
    stats_split_added(&segment->device->stats, segment->large, block->size);
}

bool free_blocks_promote(heap_t *heap)
{
  bool any = false;
  cache_close(heap);
  uint64_t progress = atomic_load(&heap->device->core->progress);
  if (heap->seen_progress == progress)
    return false;
  heap->seen_progress = progress;
  if (!pending_index_may_be_ready(heap))
    return false;
  pending_index_clear(heap);
  for (block_t *block = heap->oldest_pending, *newer; block; block = newer) {
    newer = block->newer;
    if (is_satisfied_at_home(block)) {
      free_blocks_claim(block);
      free_blocks_add(block);
      any = true;
    } else {
      if (block->counted_active && !block_is_marked(block))
        count_unmarked(block);
      pending_index_add(heap, block);
    }
  }
  return any;
}

void free_blocks_release_withheld(heap_t *heap)
{
  for (block_t *block = heap->oldest_pending, *newer; block; block = newer) {
    newer = block->newer;
    if (!block->withheld)
      continue;
    free_blocks_claim(block);
    block->withheld = false;
    free_blocks_add(block);
  }
}

/* Oversize limits apply to classic segments only: mapped ones split and merge page by page. */
static bool fits(const config_t *config, const block_t *block, size_t size)
{
  return config_fits(config, block->size, size) || block->segment->pages;
}

/* Whether the block's segment may move to another heap: it is all of it, and owes nothing. */
static bool may_move(const block_t *block)
{
  return block_is_whole_segment(block) &&
         (block_owes_nothing(block) || !RULE(QUIESCE_NEEDS_COMPLETION));
}

static inline block_t *best_ready(const heap_t *heap, size_t size, bool large, bool whole)
{
  const bins_t *bins = &heap->ready[large];
  const config_t *config = config_of(heap->device->core);
  block_t *b = bins_best_fit(bins, size);
  while (b && !(fits(config, b, size) && (!whole || may_move(b))))
    b = bins_next(bins, b);
  return b;
}

block_t *free_blocks_best_ready(const heap_t *heap, size_t size, bool large)
{
  return best_ready(heap, size, large, false);
}

block_t *free_blocks_best_whole(const heap_t *heap, size_t size, bool large)
{
  return best_ready(heap, size, large, true);
}
