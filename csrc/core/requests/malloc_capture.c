#include "malloc_capture.h"

#include "../blocks/block.h"
#include "../blocks/use.h"
#include "../memory/segment.h"
#include "../order/capture.h"
#include "../order/record.h"
#include "../pools/pool.h"

/* ---- malloc ------------------------------------------------------------ */

/* Step 2: a block whose points the program's own edges have ordered before the request. */
static block_t *take_learned(const request_t *q)
{
  branch_learn(q->heap->branch, q->presented.handle);
  lock(&q->device->lock);
  free_blocks_promote(q->heap);
  block_t *block = request_take_ready(q);
  unlock(&q->device->lock);
  return block;
}

/* Step 3: a segment that another stream had freed when the pool was quiesced. */
static block_t *take_quiesced(const request_t *q)
{
  block_t *block = NULL;
  lock(&q->device->lock);
  for (heap_t *heap = q->pool->heaps; heap && !block; heap = heap->next)
    if (heap->quiesced && heap->tag == q->tag &&
        (block = free_blocks_best_whole(heap, q->size, q->large))) {
      free_blocks_claim(block);
      segment_move(block->segment, q->heap);
      request_hand_out(q, block);
    }
  unlock(&q->device->lock);
  return block;
}

block_t *malloc_take_inside(const request_t *q)
{
  block_t *block = take_learned(q);
  return block ? block : take_quiesced(q);
}

void malloc_warn_of_ended_capture(core_t *core)
{
  config_warn_once(
      core, &core->warned_of_capture,
      "a CUDA graph capture was ended: the allocator did not know of it, and recorded an event for "
      "all streams, which ends every capture. Announce captures on streams that nobody allocates "
      "on: in Python within `with esper_alloc.capturing():`, in C with esper_capture_begin().");
}

/* ---- free -------------------------------------------------------------- */

/* Sets the points of uses that end with this free, inside the capture that the block was handed out
 * in. */
static void set_points_at_free(core_t *core, block_t *block)
{
  for (use_t *use = block->uses; use; use = use->next) {
    stream_t *s = use->stream;
    if (!use_ends_at_free(use) || use->point.branch || block_is_of(block, s))
      continue;
    capture_point_t point = {0};
    branch_t *branch = s->immortal ? capture_branch(core, s, block->capture) : NULL;
    if (branch && branch_point(branch, s->handle, &point))
      use_set_point(use, point);
    else
      use->record = stream_record_unpresented(s);
    if (branch)
      branch_drop(branch);
  }
}

bool malloc_owe_inside(device_t *device, block_t *block)
{
  unlock(&device->lock);
  captured_free_t how = capture_of_free(device->core, block->capture, block_user(block));
  if (how == FREED_INSIDE)
    set_points_at_free(device->core, block);
  else
    uses_record_at_free(block);
  lock(&device->lock);
  if (how == FREED_INSIDE)
    uses_unite_points(device, block);
  else
    owner_order_stamp(block);
  return how != FREED_OUTSIDE;
}

/* The block was handed out in an earlier capture of the pool and is freed inside a later one: for
 * example, a tensor that a forward graph saved is freed in the backward graph. What the earlier
 * graph does with it comes first, because replays keep the order of captures (rule 8). What its
 * owner did outside was waited for when the pool was quiesced, and its stream has recorded nothing
 * since. */
bool block_join_capture(block_t *block)
{
  const heap_t *home = block->segment->heap;
  if (!home->capture || !home->quiesced_at || !block_is_of(block, home->stream) ||
      atomic_load(&home->stream->last) != home->quiesced_at || !uses_have_completed(block))
    return false;
  block->capture = home->capture;
  block->stamp = 0;
  return true;
}
