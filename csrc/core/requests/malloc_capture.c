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
  branch_learn(q->heap->branch, q->stream.handle);
  lock(&q->device->lock);
  free_blocks_promote(q->heap);
  block_t *block = request_take_ready(q, false);
  unlock(&q->device->lock);
  return block;
}

/* Makes the request's stream depend on everything that a claimed block owes. A point of the
 * stream's own branch needs no edge, and does not count as a gate that was skipped. */
static bool gate_inside(const request_t *q, const block_t *block)
{
  branch_t *branch = q->heap->branch;
  uint64_t issued = 0, skipped = 0;
  bool gated = true;
  for (const use_t *use = block->uses; use && gated; use = use->next)
    if (!branch_is_after(branch, &use->point)) {
      gated = branch_gate(branch, q->stream.handle, &use->point);
      issued += gated;
    } else {
      skipped += use->point.branch != branch;
    }
  lock(&q->device->lock);
  q->device->counters.gates_issued += issued;
  q->device->counters.gates_skipped += skipped;
  unlock(&q->device->lock);
  return gated;
}

/* Steps 3 and 7: a block of a heap of the same capture. */
static block_t *take_inside(const request_t *q, heap_t *heap, inside_t how)
{
  block_t *block = NULL;
  lock(&q->device->lock);
  if (heap->capture == q->capture && heap->tag == q->tag) {
    cache_close(heap);
    block = free_blocks_best_inside(heap, q->heap->branch, q->size, q->large, how);
  }
  if (block)
    free_blocks_claim(block);
  unlock(&q->device->lock);
  if (!block)
    return NULL;
  bool taken = gate_inside(q, block);
  lock(&q->device->lock);
  if (taken && heap == q->heap)
    request_hand_out(q, block);
  else if (!taken || !request_lend(q, run_of_one(block)))
    free_blocks_add(block), taken = false;
  unlock(&q->device->lock);
  return taken ? block : NULL;
}

/* Step 4, and 7: other branches of the capture. Any branch may have used their memory without a mark,
 * and the one that freed it may wait for that later. So the request's branch must come after all. */
static block_t *take_from_branches(const request_t *q, inside_t how)
{
  if (RULE(LATE_WAITS_INSIDE) && !branch_is_after_others(q->heap->branch, q->stream.handle))
    return NULL;
  lock(&q->device->lock);
  heap_t *heap = q->pool->heaps; /* new heaps are put first; none goes meanwhile */
  unlock(&q->device->lock);
  block_t *block = NULL;
  for (; heap && !block; heap = heap->next)
    if (heap != q->heap)
      block = take_inside(q, heap, how);
  return block;
}

/* Step 4: a segment that another stream had freed when the pool was quiesced. */
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
  if (!block && request_gates_first(q))
    block = take_inside(q, q->heap, INSIDE_GATED);
  if (!block)
    block = take_from_branches(q, INSIDE_ORDERED);
  return block ? block : take_quiesced(q);
}

/* Step 7, when memory ran out. */
block_t *malloc_gate_inside(const request_t *q)
{
  block_t *block = take_inside(q, q->heap, INSIDE_GATED_AT_FREE);
  return block ? block : take_from_branches(q, INSIDE_GATED_AT_FREE);
}

/* ---- free -------------------------------------------------------------- */

/* Sets the points of uses that end with this free, inside the capture that the block was handed out
 * in. The caller adds the point of the block's own user. */
static void set_points_at_free(core_t *core, block_t *block)
{
  for (use_t *use = block->uses; use; use = use->next) {
    stream_t *s = use->stream;
    if (!(use->flags & USE_AT_FREE) || use->record || use->point.branch || block_is_of(block, s))
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

/* A lent block goes back to a branch that may come after its borrower only, but not after what other
 * branches did with it. Host memory for a use may be missing: false. */
static bool owe_all_branches(device_t *device, block_t *block, capture_point_t *points, int count)
{
  bool all = count >= 0;
  for (int i = 0; i < count; i++) {
    use_t *use = use_take(device);
    all = all && use;
    if (use)
      use_attach_point(block, points[i], USE_BY_RECORD_STREAM, &use);
    else
      capture_point_drop(&points[i]);
    if (use)
      use_give(device, use);
  }
  return all;
}

/* A lent block has a use by its borrower. The point of the free replaces it. */
static bool is_loan(block_t *block, use_t *use)
{
  return block_is_of(block, use->stream) && !use->record && !use->point.branch;
}

bool malloc_owe_inside(device_t *device, block_t *block)
{
  capture_point_t point;
  capture_point_t others[BRANCHES];
  int other_count = 0;
  bool lent = !block_is_of(block, block->segment->heap->stream) && RULE(LATE_WAITS_INSIDE);
  use_t *spare = use_take(device);
  unlock(&device->lock);
  captured_free_t how =
      capture_point_of_free(device->core, block->capture, block_user(block), &point);
  if (how == FREED_INSIDE && lent)
    other_count = branch_points_of_others(point.branch, others);
  if (how == FREED_INSIDE)
    set_points_at_free(device->core, block);
  else
    uses_record_at_free(block);
  lock(&device->lock);
  bool known = how != FREED_OUTSIDE;
  if (how != FREED_INSIDE) {
    owner_order_stamp(block);
  } else if (spare && RULE(CAPTURED_FREE_HAS_POINT)) {
    uses_drop_if(device, block, is_loan);
    use_attach_point(block, point, USE_BY_RECORD_STREAM, &spare);
    known = owe_all_branches(device, block, others, other_count);
    other_count = 0;
    uses_unite_points(device, block);
  } else {
    known = spare != NULL;
    capture_point_drop(&point);
  }
  while (other_count > 0)
    capture_point_drop(&others[--other_count]);
  if (spare)
    use_give(device, spare);
  return known;
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
