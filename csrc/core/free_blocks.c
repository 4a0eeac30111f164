#include "free_blocks.h"

#include "block.h"
#include "config.h"
#include "segment.h"
#include "stats.h"
#include "trace.h"
#include "use.h"

static device_t *device_of(const block_t *block)
{
  return block->segment->heap->pool->device;
}

static bins_t *bins_of(const block_t *block)
{
  heap_t *heap = block->segment->heap;
  return block->state == BLOCK_READY ? &heap->ready[block->segment->large]
                                     : &heap->pending[block->segment->large];
}

void free_blocks_satisfied(block_t *block)
{
  if (!block->counted_active)
    return;
  device_t *device = device_of(block);
  stats_block_satisfied(&device->stats, block);
  trace_add(device, ESPER_TRACE_FREE_COMPLETED, block->address, block->requested, block->user);
  block->counted_active = false;
  block->requested = 0;
}

static void append_pending(heap_t *heap, block_t *block)
{
  block->older = heap->newest_pending;
  block->newer = NULL;
  *(block->older ? &block->older->newer : &heap->oldest_pending) = block;
  heap->newest_pending = block;
  /* No event says anything of a captured graph's replays. */
  for (use_t *use = block->uses; use && !heap->capture; use = use->next)
    if (!use->record)
      use_hold(use);
}

static void remove_pending(heap_t *heap, block_t *block)
{
  *(block->older ? &block->older->newer : &heap->oldest_pending) = block->newer;
  *(block->newer ? &block->newer->older : &heap->newest_pending) = block->older;
  block->older = block->newer = NULL;
}

static void insert(block_t *block, block_state state)
{
  block->state = state;
  bins_insert(bins_of(block), block);
  if (state == BLOCK_PENDING)
    append_pending(block->segment->heap, block);
  block->counted_split = !block->counted_active && block_is_part(block);
  if (block->counted_split)
    stats_split_added(&device_of(block)->stats, block);
}

void free_blocks_claim(block_t *block)
{
  bins_remove(bins_of(block), block);
  if (block->state == BLOCK_PENDING)
    remove_pending(block->segment->heap, block);
  if (block->counted_split)
    stats_split_removed(&device_of(block)->stats, block);
  block->counted_split = false;
  block->state = BLOCK_CLAIMED;
}

static void add_ready(block_t *block)
{
  device_t *device = device_of(block);
  free_blocks_satisfied(block);
  if (block->next && block->next->state == BLOCK_READY) {
    free_blocks_claim(block->next);
    block_merge_next(device, block);
  }
  if (block->prev && block->prev->state == BLOCK_READY) {
    block = block->prev;
    free_blocks_claim(block);
    block_merge_next(device, block);
  }
  insert(block, BLOCK_READY);
}

void free_blocks_add(block_t *block)
{
  heap_t *heap = block->segment->heap;
  if (block->uses)
    uses_drop_completed(heap->pool->device, block);
  if (uses_are_satisfied(block, heap->stream))
    add_ready(block);
  else
    insert(block, BLOCK_PENDING);
}

void free_blocks_settle(heap_t *heap)
{
  block_t *block = heap->warm;
  if (!block)
    return;
  heap->warm = NULL;
  block->state = BLOCK_CLAIMED;
  add_ready(block);
}

void free_blocks_keep_warm(block_t *block)
{
  heap_t *heap = block->segment->heap;
  free_blocks_settle(heap);
  free_blocks_satisfied(block);
  block->state = BLOCK_WARM;
  heap->warm = block;
}

static bool is_ready(const block_t *neighbour)
{
  return neighbour && neighbour->state == BLOCK_READY;
}

/* Among the ready blocks, merged, the warm one need not be the best fit: then
 * handing it out would keep a large range in pieces. Of equals it is. */
static bool warm_fits_best(const heap_t *heap, const block_t *warm)
{
  const bins_t *bins = &heap->ready[warm->segment->large];
  if (!bins->count)
    return true;
  if (is_ready(warm->prev))
    return false;
  const block_t *rest = is_ready(warm->next) ? warm->next : NULL;
  const block_t *other = bins_best_fit(bins, warm->size);
  if (other && other == rest)
    other = bins_next(bins, rest);
  return !other || other->size >= warm->size + (rest ? rest->size : 0);
}

block_t *free_blocks_take_warm(heap_t *heap, size_t size)
{
  block_t *block = heap->warm;
  if (!block || block->size != size || !warm_fits_best(heap, block))
    return NULL;
  heap->warm = NULL;
  block->state = BLOCK_CLAIMED;
  return block;
}

void free_blocks_promote(heap_t *heap)
{
  free_blocks_settle(heap);
  uint64_t epoch = atomic_load(&heap->pool->device->core->epoch);
  if (heap->seen_epoch == epoch)
    return;
  heap->seen_epoch = epoch;
  for (block_t *block = heap->oldest_pending, *newer; block; block = newer) {
    newer = block->newer;
    if (uses_are_satisfied(block, heap->stream)) {
      free_blocks_claim(block);
      free_blocks_add(block);
    }
  }
}

block_t *free_blocks_best_ready(const heap_t *heap, size_t size, bool large)
{
  block_t *block = bins_best_fit(&heap->ready[large], size);
  const config_t *config = config_of(heap->pool->device->core);
  return block && config_fits(config, block->size, size) ? block : NULL;
}

static bool may_be_gated(const block_t *block, const stream_t *reader, bool at_free_too)
{
  for (const use_t *use = block->uses; use; use = use->next)
    if (!use_is_satisfied(use, reader) && !use_may_be_gated(use, at_free_too))
      return false;
  return true;
}

block_t *free_blocks_best_gateable(const heap_t *heap, const stream_t *reader,
                                   size_t size, bool large, bool at_free_too)
{
  const bins_t *bins = &heap->pending[large];
  const config_t *config = config_of(heap->pool->device->core);
  for (block_t *b = bins_best_fit(bins, size); b; b = bins_next(bins, b))
    if (config_fits(config, b->size, size) && may_be_gated(b, reader, at_free_too))
      return b;
  return NULL;
}

bool free_blocks_near_gateable(const heap_t *heap, const stream_t *reader, size_t size)
{
  enum { MOST = 16 }; /* a question of taste is not worth a long search */
  const bins_t *bins = &heap->pending[true];
  int looked = 0;
  for (block_t *b = bins_best_fit(bins, size); b && looked < MOST; b = bins_next(bins, b)) {
    if (b->size - size > size / 8)
      break;
    if (may_be_gated(b, reader, false))
      return true;
    looked++;
  }
  return false;
}
