#include "free.h"

#include "../base/config.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "../blocks/free_blocks.h"
#include "../blocks/map.h"
#include "../blocks/trace.h"
#include "../blocks/use.h"
#include "../memory/page_table.h"
#include "../pools/pool.h"
#include "../stats/stat.h"
#include "malloc_capture.h"
#include "release.h"

static bool has_uses_at_free(const block_t *block)
{
  for (const use_t *use = block->uses; use; use = use->next)
    if (use_ends_at_free(use))
      return true;
  return false;
}

/* Sets what a claimed block owes after its free. The device's lock is dropped meanwhile. */
static void owe_outside(device_t *device, block_t *block)
{
  owner_order_stamp(block);
  if (!has_uses_at_free(block))
    return;
  unlock(&device->lock);
  uses_record_at_free(block);
  lock(&device->lock);
}

static bool count_reads_by_graphs(device_t *device, const block_t *block)
{
  for (const use_t *use = block->uses; use; use = use->next)
    if (use->flags & USE_READ_BY_GRAPH) {
      device->counters.captured_frees++;
      return true;
    }
  return false;
}

static void warn_of_graph(core_t *core)
{
  config_warn_once(
      core, &core->warned_of_graph,
      "memory was freed that a CUDA graph reads: a tensor from outside the capture was marked "
      "inside it. If the graph is replayed again, it may read other data at that address. Keep "
      "such tensors for as long as the graph.");
}

/* Sleep waits for the owner's work before it unmaps a page, so absent memory owes no owner order.
 * But the sleep may still be under way, or a page of the block may have stayed. */
static void keep_asleep(block_t *block)
{
  if (pages_are_absent_under(block))
    block->stamp = 0;
  block->noted = 0; /* what was noted ends with the free */
  block_set_state(block, BLOCK_ASLEEP);
  if (block->uses)
    uses_drop_completed(block->segment->device, block);
  if (!block_is_marked(block))
    block_count_inactive(block);
}

/* Not inlined, so that the fast path of free need not save registers for this. */
__attribute__((noinline)) static esper_status free_slowly(core_t *core, block_t *block, void *ptr)
{
  segment_t *segment = block ? block_segment_if_any(block) : NULL;
  if (!segment)
    return error_set(ESPER_INVALID, "%p is not the start of a block of this allocator", ptr);
  device_t *device = segment->device;
  lock(&device->lock);
  if (!cache_claim_live(block, (uintptr_t)ptr)) {
    unlock(&device->lock);
    return error_set(ESPER_INVALID, "%p has been freed already", ptr);
  }
  if (block->oversize)
    stat_sub(&device->stats.oversize_allocations, 1);
  trace_add_block(device, ESPER_TRACE_FREE_REQUESTED, block, block->requested);
  bool read_by_graph = count_reads_by_graphs(device, block);
  const heap_t *home = block->segment->heap;
  pool_t *pool = home->pool;
  bool serves_at_once = !home->quiesced && home->capture == block->capture;
  pool_enter(pool); /* so that it is not quiesced meanwhile */
  if (block->capture && !serves_at_once) {
    uses_drop_captured(device, block); /* the heap has left that capture, so it is over */
    serves_at_once = block_join_capture(block);
  }
  if (block->capture && serves_at_once)
    serves_at_once = malloc_owe_inside(device, block);
  else
    owe_outside(device, block);
  pool_leave(pool);
  bool fenced = segment->fenced;
  block->withheld =
      (!serves_at_once && RULE(QUIESCE_BEFORE_REUSE)) || (fenced && RULE(FENCED_SERVES_ONCE));
  if (!pool->references)
    pool_note_work(pool);
  if (pages_sleep_under(block) && RULE(ASLEEP_SERVES_NOTHING))
    keep_asleep(block);
  else if (block->uses || block->withheld)
    free_blocks_add_beside_cache(block);
  else
    free_blocks_cache(block);
  unlock(&device->lock);
  if (read_by_graph)
    warn_of_graph(core);
  if (fenced)
    release_fenced(device, PASSED_OVER);
  return ESPER_OK;
}

esper_status free_block(core_t *core, void *ptr)
{
  if (!ptr)
    return ESPER_OK;
  block_t *block = map_find(core->map, (uintptr_t)ptr);
  return block && cache_free(block, (uintptr_t)ptr) ? ESPER_OK : free_slowly(core, block, ptr);
}
