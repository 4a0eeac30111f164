#include "malloc_deterministic.h"

#include "../blocks/block.h"
#include "../blocks/pending_index.h"
#include "../blocks/use.h"
#include "../order/retire.h"
#include "malloc_gate.h"

/* ---- the choice ---------------------------------------------------------- */

/* Whether the block belongs to a range: it is ready, or a gate can make it ready. */
static bool joins(const request_t *q, const block_t *block)
{
  return block && (block->state == BLOCK_READY ||
                   (block->state == BLOCK_PENDING &&
                    free_blocks_may_be_gated(block, q->stream.stream, false)));
}

static bool joins_pending(const request_t *q, const block_t *block)
{
  return joins(q, block) && block->state == BLOCK_PENDING;
}

/* The order of best fit: the smaller one first, then that in the older segment. */
static bool range_before(run_t a, run_t b)
{
  if (a.size != b.size)
    return a.size < b.size;
  const segment_t *of_a = a.first->segment, *of_b = b.first->segment;
  return of_a != of_b ? of_a->sequence < of_b->sequence : a.first->address < b.first->address;
}

static bool fits(const request_t *q, run_t range)
{
  return range.size >= q->size &&
         (range.first->segment->pages || config_fits(q->config, range.size, q->size));
}

static void consider(const request_t *q, run_t *best, run_t range)
{
  if (fits(q, range) && (!best->first || range_before(range, *best)))
    *best = range;
}

/* Extends a range by the blocks behind it. */
static run_t range_after(const request_t *q, run_t range)
{
  while (joins(q, range.last->next)) {
    range.last = range.last->next;
    range.size += range.last->size;
  }
  return range;
}

/* The range around a pending block. Empty if the block is not the range's first pending one, so
 * that each range is found once. */
static run_t range_from(const request_t *q, block_t *block)
{
  run_t range = run_of_one(block), none = {0};
  if (joins(q, block->prev)) {
    range.first = block->prev;
    range.size += range.first->size;
    /* Two ready blocks are never neighbours. */
    if (range.first->state == BLOCK_PENDING || joins(q, range.first->prev))
      return none;
  }
  return joins(q, block) ? range_after(q, range) : none;
}

/* Looks at every range. */
static run_t best_of_all(const request_t *q)
{
  run_t best = {0};
  for (const segment_t *s = q->device->first_segment; s; s = s->next)
    for (block_t *b = s->first; b && s->heap == q->heap && s->large == q->large; b = b->next)
      if (joins(q, b)) {
        run_t range = range_after(q, run_of_one(b));
        consider(q, &best, range);
        b = range.last;
      }
  return best;
}

static bool is_free(const block_t *neighbour)
{
  return neighbour && block_is_in_bin(neighbour);
}

/* Whether the block need not be looked at: it is too small, and no free block is beside it. */
static bool is_out_of_question(const request_t *q, const block_t *block)
{
  return block->segment->large != q->large ||
         (block->size < q->size && !is_free(block->prev) && !is_free(block->next));
}

/* Finds the best ready block that is a range by itself. Ready blocks beside pending ones are passed
 * over, because the walk over pending blocks finds their ranges. False: there are so many of them
 * that it is quicker to look at every range. */
static bool find_ready(const request_t *q, run_t *ready)
{
  enum { MANY = 128 };
  const bins_t *bins = &q->heap->ready[q->large];
  block_t *block = bins_best_fit(bins, q->size);
  int passed_over = 0;
  while (block && (joins_pending(q, block->prev) || joins_pending(q, block->next) ||
                   !fits(q, run_of_one(block)))) {
    if (++passed_over > MANY)
      return false;
    block = bins_next(bins, block);
  }
  *ready = run_of_one(block);
  return true;
}

/* Both ways of looking find the same range. */
static run_t best_range(const request_t *q)
{
  run_t best = {0}, ready;
  if (!find_ready(q, &ready))
    return best_of_all(q);
  if (ready.first)
    consider(q, &best, ready);
  if (pending_are_barred(q->heap, q->large))
    return best;
  for (block_t *b = q->heap->oldest_pending; b; b = b->newer)
    if (!is_out_of_question(q, b)) {
      run_t range = range_from(q, b);
      if (range.first)
        consider(q, &best, range);
    }
  return best;
}

static run_t first_blocks(run_t range, size_t size)
{
  run_t run = run_of_one(range.first);
  while (run.size < size) {
    run.last = run.last->next;
    run.size += run.last->size;
  }
  return run;
}

/* ---- taking it ----------------------------------------------------------- */

static bool owes(const request_t *q, run_t run)
{
  for (const block_t *b = run.first;; b = b->next) {
    if (!uses_are_satisfied(b, q->stream.stream))
      return true;
    if (b == run.last)
      return false;
  }
}

/* Takes the run's first `size` bytes, which owe nothing any more. The rest of its last block is
 * free again, and owes what that block owed. */
static block_t *take_share(const request_t *q, run_t run, size_t size)
{
  block_count_inactive(run.last);
  size_t extra = run.size - size;
  block_t *rest = extra ? block_split(q->device, run.last, run.last->size - extra) : NULL;
  if (rest) {
    free_blocks_add(rest);
    run.size = size;
  }
  return free_blocks_unite(run, run.size);
}

block_t *malloc_take_deterministic(const request_t *q)
{
  lock(&q->device->lock);
  free_blocks_promote(q->heap);
  run_t range = best_range(q);
  if (!range.first) {
    unlock(&q->device->lock);
    return NULL;
  }
  size_t size = request_share(q, range.first->segment, range.size);
  run_t run = first_blocks(range, size);
  free_blocks_claim_run(run);
  bool gated = !owes(q, run);
  if (!gated) {
    unlock(&q->device->lock);
    stream_retire_all(q->core); /* what has completed needs no gate */
    gating_t gating = {0};
    gated = malloc_gate_run(q, run, &gating);
    lock(&q->device->lock);
    malloc_note_gating(q, &gating);
  }
  block_t *block = gated ? take_share(q, run, size) : NULL;
  if (block)
    request_hand_out(q, block);
  else
    free_blocks_add_run(run);
  unlock(&q->device->lock);
  return block;
}
