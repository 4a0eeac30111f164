#include "malloc_gate.h"

#include "../blocks/use.h"
#include "../order/wait_log.h"
#include "../pools/pool.h"
#include "drain.h"

/* ---- gates ------------------------------------------------------------------ */

/* Makes the request's stream wait for the record. `size`: of the block that it waits for. */
static bool gate_record(const request_t *q, record_t *record, size_t size, gating_t *gating)
{
  gate_result result = stream_gate(q->stream, record);
  if (result == GATE_ISSUED && gating->issued < LOGGED_GATES) {
    gating->log[gating->issued].record = record;
    gating->log[gating->issued].size = size;
  }
  gating->issued += result == GATE_ISSUED;
  gating->skipped += result == GATE_NEEDLESS;
  return result != GATE_REFUSED;
}

void malloc_note_gating(const request_t *q, const gating_t *gating)
{
  q->device->counters.gates_issued += gating->issued;
  q->device->counters.gates_skipped += gating->skipped;
  for (uint64_t i = 0; i < gating->issued && i < LOGGED_GATES; i++)
    wait_log_add(q->device, q->stream.stream, gating->log[i].record, gating->log[i].size);
}

/* The latest record in the run on the stream of this use. Waiting for it waits for the earlier
 * ones, too. */
static record_t *latest_on_stream(run_t run, const use_t *of)
{
  record_t *latest = of->record;
  for (const block_t *b = run.first;; b = b->next) {
    for (const use_t *use = b->uses; use; use = use->next)
      if (use->stream == of->stream && use->record && use->record->number > latest->number)
        latest = use->record;
    if (b == run.last)
      return latest;
  }
}

bool malloc_gate_run(const request_t *q, run_t run, gating_t *gating)
{
  bool gated = true;
  for (const block_t *b = run.first; gated; b = b->next) {
    for (use_t *use = b->uses; use && gated; use = use->next) {
      if (use_is_satisfied(use, q->stream.stream))
        gating->skipped++;
      else
        gated = gate_record(q, latest_on_stream(run, use), b->size, gating);
    }
    if (b == run.last)
      break;
  }
  return gated;
}

/* ---- the request's own heap -------------------------------------------------- */

/* One pending block, or a run of neighbours if no single block serves. */
static run_t find_gateable(const request_t *q, const heap_t *heap, gate_choice_t choice)
{
  block_t *block = free_blocks_best_gateable(heap, q->stream.stream, q->size, q->large, choice);
  return block ? run_of_one(block)
               : free_blocks_gateable_run(heap, q->stream.stream, q->size, q->large, choice);
}

run_t malloc_claim_gateable(const request_t *q)
{
  run_t run = find_gateable(q, q->heap, request_gate_choice(q));
  if (run.first)
    free_blocks_claim_run(run);
  return run;
}

block_t *malloc_gate_claimed(const request_t *q, run_t run)
{
  gating_t gating = {0};
  block_t *block = NULL;
  bool gated = malloc_gate_run(q, run, &gating);
  lock(&q->device->lock);
  malloc_note_gating(q, &gating);
  if (gated)
    block = request_hand_out_run(q, run);
  else
    free_blocks_add_run(run);
  unlock(&q->device->lock);
  return block;
}

block_t *malloc_gate_own(const request_t *q)
{
  lock(&q->device->lock);
  cache_close(q->heap);
  run_t run = find_gateable(q, q->heap, GATE_AT_LAST);
  if (run.first)
    free_blocks_claim_run(run);
  unlock(&q->device->lock);
  return run.first ? malloc_gate_claimed(q, run) : NULL;
}

/* ---- other heaps --------------------------------------------------------------- */

/* Of another heap: the best-fitting ready block, if a gate makes it ready for the request's stream.
 * Otherwise a pending block or a run. */
static run_t find_elsewhere(const request_t *q, heap_t *heap)
{
  cache_close(heap);
  block_t *block = free_blocks_best_ready(heap, q->size, q->large);
  bool may = block != NULL;
  for (const use_t *use = block ? block->uses : NULL; use; use = use->next)
    may = may && (use_is_satisfied(use, q->stream.stream) || use_may_be_gated(use, true));
  return may ? run_of_one(block) : find_gateable(q, heap, GATE_AT_LAST);
}

/* Whether the request's stream must wait for owner order of the run's blocks. Stores the latest
 * stamp of these blocks, which covers all of them. */
static bool owes_owner_order(const request_t *q, run_t run, uint64_t *stamp)
{
  bool owes = false;
  *stamp = 0;
  for (const block_t *b = run.first;; b = b->next) {
    owes |= !owner_order_is_satisfied(b, q->stream.stream);
    if (b->stamp > *stamp)
      *stamp = b->stamp;
    if (b == run.last)
      return owes;
  }
}

/* Claims a run of another heap. *stamp: the owner order that the request's stream must be gated on,
 * or 0. Runs that owe some are looked at only with `owing`. */
static run_t claim_elsewhere(const request_t *q, bool owing, uint64_t *stamp)
{
  run_t run = {0};
  lock(&q->device->lock);
  for (heap_t *heap = q->pool->heaps; heap && !run.first; heap = heap->next) {
    if (!request_may_borrow(q, heap))
      continue;
    run = find_elsewhere(q, heap);
    if (!run.first || !owes_owner_order(q, run, stamp))
      *stamp = 0;
    else if (!owing)
      run.first = NULL;
  }
  if (run.first) {
    free_blocks_claim_run(run);
    for (block_t *b = run.first; b != run.last->next; b = b->next)
      uses_drop_completed(q->device, b); /* a claimed block's count as unfinished */
  }
  unlock(&q->device->lock);
  return run;
}

static void put_back(const request_t *q, run_t run)
{
  lock(&q->device->lock);
  free_blocks_add_run(run);
  unlock(&q->device->lock);
}

block_t *malloc_gate_other(const request_t *q)
{
  uint64_t stamp = 0;
  record_t *owner_order = NULL;
  run_t run = claim_elsewhere(q, true, &stamp);
  if (run.first && stamp) {
    owner_order = stream_probe(owner_order_stream(run.first->segment->heap), stamp);
    /* The record stands for work of all streams. A stream may wait for that only where the host
     * may, too. The question comes after the record, so that it covers all of this work. */
    if (!owner_order || !drain_may_wait(q->device)) {
      put_back(q, run);
      if (owner_order)
        record_drop(owner_order);
      owner_order = NULL;
      run = claim_elsewhere(q, false, &stamp);
    }
  }
  if (!run.first)
    return NULL;

  gating_t gating = {0};
  bool gated = malloc_gate_run(q, run, &gating) &&
               (!owner_order || gate_record(q, owner_order, run.size, &gating));
  lock(&q->device->lock);
  malloc_note_gating(q, &gating);
  block_t *block = gated ? request_lend(q, run) : NULL;
  if (!block)
    free_blocks_add_run(run);
  unlock(&q->device->lock);
  if (owner_order)
    record_drop(owner_order);
  return block;
}
