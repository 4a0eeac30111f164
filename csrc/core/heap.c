/* heap.c: malloc and free.
 *
 * malloc looks for memory in this order, and stops at the first that serves:
 *   1. a ready block of its own heap
 *   2. the same, after finding out what has completed
 *   3. reuse order `gate`, or `auto` and the wait looks short: a pending block
 *      of its own heap, the GPU waiting
 *   4. a completed block of another heap, lent
 *   5. a new segment
 *   6. what the embedder's callback frees
 *   7. any block that a gate can make ready, other heaps included
 *   8. a pending block, the host waiting for it; then whatever a synchronised
 *      device leaves free; then a new segment after giving cached ones back
 * and then reports that memory is exhausted. Each step takes the device's lock
 * for itself: driver calls are made on claimed blocks, without it. Inside a
 * capture only what the capture itself freed is reusable, and what its pool had
 * when it was sealed: there gates are edges of the graph, nothing is asked of
 * events, and nobody waits. */
#include "heap.h"

#include "block.h"
#include "call.h"
#include "capture.h"
#include "config.h"
#include "error.h"
#include "free_blocks.h"
#include "gates.h"
#include "map.h"
#include "pool.h"
#include "seal.h"
#include "segment.h"
#include "settle.h"
#include "stats.h"
#include "stream.h"
#include "trace.h"
#include "use.h"

/* Reuse order `auto` lets a stream wait for one that is so much further behind. */
static const int64_t AUTO_LAG_US = 3000;

typedef struct request {
  core_t *core;
  device_t *device;
  pool_t *pool;
  heap_t *heap; /* home of what is handed out, unless it is lent */
  const config_t *config;
  presented_t stream;
  uint64_t capture; /* 0: none */
  size_t asked; /* bytes */
  size_t size;  /* of the block */
  bool large;
} request_t;

static run_t run_of(block_t *block)
{
  return block ? (run_t){block, block, block->size} : (run_t){0};
}

/* ---- handing out ------------------------------------------------------- */

/* A claimed block, satisfied for the request's stream, becomes live. What it
 * owed stays with the part that is not taken. */
static void hand_out(const request_t *q, block_t *block)
{
  free_blocks_satisfied(block);
  if (config_splits(q->config, block->size, q->size, q->large)) {
    block_t *rest = block_split(q->device, block, q->size);
    if (rest)
      free_blocks_add(rest);
  }
  uses_drop(q->device, block);
  block->requested = q->asked;
  block->user = q->stream.stream;
  block->capture = q->capture;
  if (q->capture)
    block->segment->captured = true;
  block->state = BLOCK_LIVE;
  block->counted_active = true;
  block->oversize = config_is_oversize(q->config, block->size);
  stats_block_allocated(&q->device->stats, block);
  trace_add(q->device, ESPER_TRACE_ALLOC, block->address, q->asked, block->user);
}

/* The same for a claimed run. */
static block_t *hand_out_run(const request_t *q, run_t run)
{
  block_t *block = run.first == run.last ? run.first : free_blocks_unite(run, q->size);
  hand_out(q, block);
  return block;
}

/* The same for blocks of another heap: the borrower will be a use when it frees
 * what it got. A segment that is wholly free and owes nothing moves. NULL: no
 * host memory, and nothing has happened. */
static block_t *lend(const request_t *q, run_t run)
{
  block_t *block = run.first;
  bool owes_nothing = uses_have_completed(block) && owner_order_has_completed(block);
  if (segment_is_whole(block) && (owes_nothing || !RULE(MOVE_NEEDS_COMPLETION))) {
    uses_drop(q->device, block);
    block->stamp = 0;
    segment_move(block->segment, q->heap);
    hand_out(q, block);
    return block;
  }
  use_t *use = use_take(q->device);
  if (!use)
    return NULL;
  block = hand_out_run(q, run);
  if (RULE(LOAN_MAKES_USE))
    (void)use_attach(block, q->stream.stream, NULL, USE_AT_FREE, &use);
  if (use)
    use_give(q->device, use);
  q->device->counters.loans++;
  return block;
}

/* ---- the steps --------------------------------------------------------- */

/* Reuse orders `gate` and `auto`. */
static bool gates_first(const request_t *q)
{
  return q->config->as_given.reuse_order != ESPER_REUSE_GROW;
}

/* Taking a much larger ready block while a pending one fits nearly exactly
 * would break up memory for the sake of a short wait. */
static bool wastes_ready(const request_t *q, const block_t *ready)
{
  if (!RULE(READY_FIRST)) { /* whatever fits best */
    const block_t *pending =
        free_blocks_best_gateable(q->heap, q->stream.stream, q->size, q->large, false);
    return pending && pending->size <= ready->size;
  }
  return gates_first(q) && q->large && ready->size / 4 > q->size &&
         free_blocks_near_gateable(q->heap, q->stream.stream, q->size);
}

static block_t *take_ready_locked(const request_t *q, bool sparing)
{
  block_t *warm = free_blocks_take_warm(q->heap, q->size);
  if (warm) {
    hand_out(q, warm);
    return warm;
  }
  free_blocks_settle(q->heap);
  block_t *block = free_blocks_best_ready(q->heap, q->size, q->large);
  if (!block || (sparing && q->heap->oldest_pending && wastes_ready(q, block)))
    return NULL;
  free_blocks_claim(block);
  hand_out(q, block);
  return block;
}

/* Whatever it wastes. */
static block_t *take_ready(const request_t *q)
{
  lock(&q->device->lock);
  block_t *block = take_ready_locked(q, false);
  unlock(&q->device->lock);
  return block;
}

static block_t *take_retired(const request_t *q, bool sparing)
{
  stream_retire_all(q->core);
  lock(&q->device->lock);
  free_blocks_promote(q->heap);
  block_t *block = take_ready_locked(q, sparing);
  unlock(&q->device->lock);
  return block;
}

/* Makes the request's stream wait for the record, for the sake of a block. */
static bool gate_record(const request_t *q, record_t *record, size_t size)
{
  gate_result result = stream_gate(q->stream, record);
  lock(&q->device->lock);
  q->device->counters.gates_issued += result == GATE_ISSUED;
  q->device->counters.gates_skipped += result == GATE_NEEDLESS;
  if (result == GATE_ISSUED)
    gates_note(q->device, q->stream.stream, record, size);
  unlock(&q->device->lock);
  return result != GATE_REFUSED;
}

/* The run's latest record on the stream of one of its uses: who waits for that
 * has waited for the others. */
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

/* ... for all that the blocks of a claimed run owe. */
static bool gate_run(const request_t *q, run_t run, record_t *owner_order)
{
  uint64_t skipped = 0;
  bool gated = true;
  for (const block_t *b = run.first; gated; b = b->next) {
    for (use_t *use = b->uses; use && gated; use = use->next) {
      if (use_is_satisfied(use, q->stream.stream))
        skipped++;
      else
        gated = gate_record(q, latest_on_stream(run, use), b->size);
    }
    if (b == run.last)
      break;
  }
  if (gated && owner_order)
    gated = gate_record(q, owner_order, run.size);
  lock(&q->device->lock);
  q->device->counters.gates_skipped += skipped;
  unlock(&q->device->lock);
  return gated;
}

/* One pending block, or if none serves several neighbours. */
static run_t find_gateable(const request_t *q, const heap_t *heap, bool at_free_too)
{
  block_t *block = free_blocks_best_gateable(heap, q->stream.stream, q->size, q->large,
                                             at_free_too);
  return block ? run_of(block)
               : free_blocks_gateable_run(heap, q->stream.stream, q->size, q->large,
                                          at_free_too);
}

/* Whether a segment would pass the memory fraction, or the driver had no memory
 * for such a one when it was asked last. */
static bool cannot_grow(const request_t *q)
{
  const device_t *d = q->device;
  size_t size = config_segment_size(q->config, q->size);
  size_t reserved = (size_t)d->stats.reserved_bytes[ESPER_ALL].current + d->reserving;
  return (d->limit && reserved + size > d->limit) || (d->refused && size >= d->refused);
}

/* Reuse order `auto`: a gate makes the request's stream wait for about as long
 * as the other one is further behind the host. docs/design.md has the figures. */
static bool waits_long(const request_t *q, run_t run)
{
  int64_t now = q->core->clock_us(), own = stream_lag_us(q->stream.stream, now);
  for (const block_t *b = run.first;; b = b->next) {
    for (const use_t *use = b->uses; use; use = use->next) {
      int64_t lag = stream_lag_us(use->stream, now);
      if (lag > AUTO_LAG_US && (own == INT64_MAX || lag - own > AUTO_LAG_US) &&
          !use_is_satisfied(use, q->stream.stream))
        return true;
    }
    if (b == run.last)
      return false;
  }
}

/* Step 3, and with `at_free_too` the first half of step 7. */
static block_t *gate_own(const request_t *q, bool at_free_too)
{
  lock(&q->device->lock);
  run_t run = find_gateable(q, q->heap, at_free_too);
  if (run.first && !at_free_too && q->config->as_given.reuse_order == ESPER_REUSE_AUTO &&
      !cannot_grow(q) && waits_long(q, run))
    run.first = NULL;
  if (run.first)
    free_blocks_claim_run(run);
  unlock(&q->device->lock);
  if (!run.first)
    return NULL;
  bool gated = gate_run(q, run, NULL);
  block_t *block = NULL;
  lock(&q->device->lock);
  if (gated)
    block = hand_out_run(q, run);
  else
    free_blocks_add_run(run);
  unlock(&q->device->lock);
  return block;
}

static bool may_borrow_from(const request_t *q, const heap_t *heap)
{
  return heap != q->heap && !heap->capture;
}

/* Step 4. What other heaps owe to their own streams is often done but nobody
 * asked: the first round asks, the second looks again. */
static block_t *borrow(const request_t *q)
{
  enum { PROBES = 8 };
  struct {
    stream_t *stream;
    uint64_t stamp;
  } probes[PROBES];
  for (int round = 0; round < 2; round++) {
    int count = 0;
    lock(&q->device->lock);
    for (heap_t *heap = q->pool->heaps; heap; heap = heap->next) {
      if (!may_borrow_from(q, heap))
        continue;
      free_blocks_promote(heap);
      block_t *block = free_blocks_best_ready(heap, q->size, q->large);
      if (!block)
        continue;
      if ((uses_have_completed(block) && owner_order_has_completed(block)) ||
          !RULE(LOAN_NEEDS_COMPLETION)) {
        free_blocks_claim(block);
        if (lend(q, run_of(block))) {
          unlock(&q->device->lock);
          return block;
        }
        free_blocks_add(block);
      } else if (count < PROBES) {
        probes[count].stream = heap->stream;
        probes[count++].stamp = block->stamp;
      }
    }
    unlock(&q->device->lock);
    if (!count)
      return NULL;
    for (int i = 0; i < count; i++) {
      record_t *probe = stream_probe(probes[i].stream, probes[i].stamp);
      if (probe)
        record_drop(probe);
    }
    stream_retire_all(q->core);
  }
  return NULL;
}

static block_t *grow(const request_t *q, esper_status *status)
{
  block_t *block = NULL;
  *status = segment_obtain(q->heap, config_segment_size(q->config, q->size), q->large, &block);
  if (*status != ESPER_OK)
    return NULL;
  lock(&q->device->lock);
  hand_out(q, block);
  unlock(&q->device->lock);
  return block;
}

/* The free block of another heap that fits best, if a gate makes it ready; or
 * what find_gateable finds there. */
static run_t find_elsewhere(const request_t *q, heap_t *heap)
{
  free_blocks_settle(heap);
  block_t *block = free_blocks_best_ready(heap, q->size, q->large);
  bool may = block != NULL;
  for (const use_t *use = block ? block->uses : NULL; use; use = use->next)
    may = may && (use_is_satisfied(use, q->stream.stream) || use_may_be_gated(use, true));
  return may ? run_of(block) : find_gateable(q, heap, true);
}

/* The latest owner order of its blocks: the position that all are covered from.
 * Whether somebody has to wait for it. */
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

/* Step 7, for blocks of other heaps: their owner order is owed too. */
static block_t *gate_other(const request_t *q)
{
  run_t run = {0};
  uint64_t stamp = 0;
  bool owes = false;
  lock(&q->device->lock);
  for (heap_t *heap = q->pool->heaps; heap && !run.first; heap = heap->next) {
    if (!may_borrow_from(q, heap))
      continue;
    run = find_elsewhere(q, heap);
    owes = run.first && owes_owner_order(q, run, &stamp);
    if (owes && !owner_order_may_be_gated(run.first))
      run.first = NULL;
  }
  if (run.first)
    free_blocks_claim_run(run);
  unlock(&q->device->lock);
  if (!run.first)
    return NULL;

  record_t *owner_order = owes ? stream_probe(run.first->segment->heap->stream, stamp) : NULL;
  bool gated = (!owes || owner_order) && gate_run(q, run, owner_order);
  if (owner_order)
    record_drop(owner_order);
  lock(&q->device->lock);
  block_t *block = gated ? lend(q, run) : NULL;
  if (!block)
    free_blocks_add_run(run);
  unlock(&q->device->lock);
  return block;
}

/* The record that the oldest pending block of the heap waits for; NULL: none
 * that the host may wait for. A use without gate may depend on what this very
 * thread has still to enqueue, so the host does not wait for it either. */
static record_t *oldest_wait(const request_t *q)
{
  record_t *oldest = NULL;
  lock(&q->device->lock);
  for (block_t *b = q->heap->oldest_pending; b && !oldest; b = b->newer)
    for (use_t *use = b->uses; use && !oldest; use = use->next)
      if (use->record && !use_is_satisfied(use, q->heap->stream) && !use_is_rendezvous(use))
        record_keep(oldest = use->record);
  unlock(&q->device->lock);
  return oldest;
}

/* Step 8a: one event at a time, until there is enough. */
static block_t *wait_for_pending(const request_t *q)
{
  record_t *oldest;
  while ((oldest = oldest_wait(q))) {
    esper_status status = stream_wait_host(oldest);
    record_drop(oldest);
    block_t *block = take_retired(q, false);
    if (block)
      return block;
    if (status != ESPER_OK)
      return NULL;
  }
  return NULL;
}

/* ---- out of memory ----------------------------------------------------- */

static _Thread_local esper_failure last_failure;

void esper_get_failure(esper_failure *failure)
{
  *failure = last_failure;
}

static esper_status out_of_memory(const request_t *q)
{
  size_t device_free = 0, device_total = q->device->total;
  call_memory_info(q->core, q->device->index, &device_free, &device_total);
  lock(&q->device->lock);
  esper_stats *stats = &q->device->stats;
  stats->num_ooms++;
  trace_add(q->device, ESPER_TRACE_OOM, device_free, q->asked, q->stream.stream);
  size_t in_pools = 0;
  for (segment_t *s = q->device->first_segment; s; s = s->next)
    if (s->heap->pool != &q->device->default_pool)
      in_pools += s->size;
  last_failure = (esper_failure){
      .device = q->device->index,
      .requested = q->asked,
      .device_free = device_free,
      .device_total = device_total,
      .limit = q->device->limit,
      .allocated = (size_t)stats->allocated_bytes[ESPER_ALL].current,
      .private_pools = in_pools,
      .reserved = (size_t)stats->reserved_bytes[ESPER_ALL].current,
  };
  unlock(&q->device->lock);
  return error_set(ESPER_OUT_OF_MEMORY,
                   "out of memory on device %d: %zu bytes asked for, %zu of %zu free there, "
                   "%zu allocated, %zu reserved",
                   q->device->index, q->asked, device_free, device_total,
                   last_failure.allocated, last_failure.reserved);
}

static bool callback_freed_memory(const request_t *q)
{
  const esper_config *given = &q->config->as_given;
  return given->free_memory && given->free_memory(given->free_memory_context);
}

/* ---- inside a capture --------------------------------------------------- */

/* Step 2: what has been ordered since, by the program's own edges. */
static block_t *take_learned(const request_t *q)
{
  branch_learn(q->heap->branch, q->stream.handle);
  lock(&q->device->lock);
  free_blocks_promote(q->heap);
  block_t *block = take_ready_locked(q, false);
  unlock(&q->device->lock);
  return block;
}

/* Makes the request's stream depend on all that a claimed block owes. */
static bool gate_inside(const request_t *q, const block_t *block)
{
  branch_t *branch = q->heap->branch;
  uint64_t issued = 0;
  bool gated = true;
  for (const use_t *use = block->uses; use && gated; use = use->next)
    if (!branch_is_after(branch, &use->place)) {
      gated = branch_gate(branch, q->stream.handle, &use->place);
      issued += gated;
    }
  lock(&q->device->lock);
  q->device->counters.gates_issued += issued;
  unlock(&q->device->lock);
  return gated;
}

/* Steps 3 and 7: a block of a heap of the same capture. */
static block_t *take_inside(const request_t *q, heap_t *heap, inside_t how)
{
  lock(&q->device->lock);
  free_blocks_settle(heap);
  block_t *block = free_blocks_best_inside(heap, q->heap->branch, q->size, q->large, how);
  if (block)
    free_blocks_claim(block);
  unlock(&q->device->lock);
  if (!block)
    return NULL;
  bool taken = gate_inside(q, block);
  lock(&q->device->lock);
  if (taken && heap == q->heap)
    hand_out(q, block);
  else if (!taken || !lend(q, run_of(block)))
    free_blocks_add(block), taken = false;
  unlock(&q->device->lock);
  return taken ? block : NULL;
}

/* Step 4, and 7: other branches of the capture. */
static block_t *take_from_branches(const request_t *q, inside_t how)
{
  lock(&q->device->lock);
  heap_t *heap = q->pool->heaps; /* new ones come in front; none goes meanwhile */
  unlock(&q->device->lock);
  block_t *block = NULL;
  for (; heap && !block; heap = heap->next)
    if (heap != q->heap && heap->capture == q->capture)
      block = take_inside(q, heap, how);
  return block;
}

/* Step 4: a segment that another stream freed before the pool was sealed. */
static block_t *take_sealed(const request_t *q)
{
  block_t *block = NULL;
  lock(&q->device->lock);
  for (heap_t *heap = q->pool->heaps; heap && !block; heap = heap->next)
    if (heap->sealed && (block = free_blocks_best_whole(heap, q->size, q->large))) {
      free_blocks_claim(block);
      segment_move(block->segment, q->heap);
      hand_out(q, block);
    }
  unlock(&q->device->lock);
  return block;
}

static block_t *find_inside(const request_t *q)
{
  block_t *block = take_learned(q);
  if (!block && gates_first(q))
    block = take_inside(q, q->heap, INSIDE_GATED);
  if (!block)
    block = take_from_branches(q, INSIDE_ORDERED);
  return block ? block : take_sealed(q);
}

/* Step 7, when memory ran out. */
static block_t *find_inside_at_last(const request_t *q)
{
  block_t *block = take_inside(q, q->heap, INSIDE_GATED_AT_FREE);
  return block ? block : take_from_branches(q, INSIDE_GATED_AT_FREE);
}

/* ---- malloc -------------------------------------------------------------- */

/* Steps 2 to 5. */
static block_t *find_or_grow(const request_t *q, esper_status *status)
{
  block_t *block;
  if (q->capture)
    return (block = find_inside(q)) ? block : grow(q, status);
  if ((block = take_retired(q, gates_first(q))))
    return block;
  if (gates_first(q) && ((block = gate_own(q, false)) || (block = take_ready(q))))
    return block;
  if ((block = borrow(q)) || (!RULE(OWNER_NOT_GATED_EARLY) && (block = gate_other(q))))
    return block;
  return grow(q, status);
}

/* Step 8: the host waits. */
static block_t *wait_and_release(const request_t *q, esper_status *status)
{
  block_t *block = wait_for_pending(q);
  if (block)
    return block;
  lock(&q->device->lock);
  q->device->stats.num_alloc_retries++;
  unlock(&q->device->lock);
  /* Giving memory back waits for the device too. */
  bool may_wait = settle_may_wait(q->device);
  if (may_wait)
    settle_device(q->device);
  if ((block = take_retired(q, false)) || (block = borrow(q)) || !may_wait)
    return block;
  size_t wanted = config_segment_size(q->config, q->size);
  if (heap_release(q->device, NULL, NULL, wanted) && (block = grow(q, status)))
    return block;
  return heap_release(q->device, NULL, NULL, SIZE_MAX) ? grow(q, status) : NULL;
}

static block_t *find_slowly(const request_t *q, esper_status *status)
{
  block_t *block = find_or_grow(q, status);
  if (!block && *status == ESPER_OUT_OF_MEMORY && callback_freed_memory(q))
    block = find_or_grow(q, status);
  if (block || *status != ESPER_OUT_OF_MEMORY)
    return block;
  if (q->capture)
    return find_inside_at_last(q);
  if ((block = gate_own(q, true)) || (block = gate_other(q)))
    return block;
  return wait_and_release(q, status);
}

static heap_t *heap_of(const request_t *q)
{
  heap_t *heap = pool_heap(q->pool, q->stream.stream, q->capture);
  if (heap && q->capture && !heap->branch)
    heap->branch = capture_branch(q->core, q->stream.stream, q->capture);
  return heap && q->capture && !heap->branch ? NULL : heap;
}

esper_status heap_malloc(pool_t *pool, size_t size, esper_stream stream, void **ptr)
{
  device_t *device = pool->device;
  core_t *core = device->core;
  *ptr = NULL;
  if (!size)
    return ESPER_OK;

  request_t q = {.core = core, .device = device, .pool = pool, .config = config_of(core),
                 .asked = size};
  q.size = config_round(q.config, size);
  esper_status status = stream_present(core, stream, &q.stream);
  if (status != ESPER_OK)
    return status;
  if (!q.size)
    return out_of_memory(&q);
  q.large = config_is_large(q.size);
  q.capture = RULE(CAPTURE_KEEPS_APART) ? stream_capture_of(q.stream, false) : 0;
  /* Memory of the wrong side of a capture's border would be reused there. */
  if (q.capture == CAPTURE_UNKNOWN)
    return error_from_driver(core, atomic_load(&core->shut_down) ? ESPER_SHUT_DOWN
                                                                 : ESPER_DEVICE_ERROR);
  /* Nothing of an invalidated capture ever runs: what is asked for will be used
   * after it. */
  if (q.capture == ESPER_CAPTURE_INVALID)
    q.capture = 0;
  if (q.capture)
    capture_note_thread(q.capture, q.stream.stream);
  else if (atomic_load_explicit(&q.stream.stream->holds, memory_order_relaxed))
    settle_stream(core, q.stream);

  lock(&device->lock);
  q.heap = heap_of(&q);
  block_t *block = q.heap ? take_ready_locked(&q, true) : NULL;
  unlock(&device->lock);
  if (!q.heap)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a heap");
  if (!block)
    block = find_slowly(&q, &status);
  if (!block)
    return status == ESPER_OUT_OF_MEMORY ? out_of_memory(&q) : status;
  *ptr = (void *)block->address;
  return ESPER_OK;
}

/* ---- free -------------------------------------------------------------- */

static bool has_uses_at_free(const block_t *block)
{
  for (const use_t *use = block->uses; use; use = use->next)
    if (use->flags & USE_AT_FREE && !use->record)
      return true;
  return false;
}

/* Uses that end with the free get their event now. The block is claimed, so
 * its uses are ours alone. */
static void record_uses_at_free(block_t *block)
{
  for (use_t *use = block->uses; use; use = use->next)
    if (use->flags & USE_AT_FREE && !use->record)
      use->record = stream_record_later(use->stream);
}

/* The same inside the capture that the block was handed out in. The user's own
 * place is the caller's to add. */
static void place_uses_at_free(core_t *core, block_t *block)
{
  for (use_t *use = block->uses; use; use = use->next) {
    stream_t *s = use->stream;
    if (!(use->flags & USE_AT_FREE) || use->record || use->place.branch || s == block->user)
      continue;
    place_t place = {0};
    branch_t *branch = s->immortal ? capture_branch(core, s, block->capture) : NULL;
    if (branch && branch_place(branch, s->handle, &place))
      use_set_place(use, place);
    else
      use->record = stream_record_later(s);
    if (branch)
      branch_drop(branch);
  }
}

/* The loan's use is over: the borrower's place stands for it. */
static void drop_use_of_user(device_t *device, block_t *block)
{
  for (use_t **link = &block->uses; *link;) {
    use_t *use = *link;
    if (use->stream == block->user && !use->record && !use->place.branch) {
      *link = use->next;
      use_give(device, use);
    } else {
      link = &use->next;
    }
  }
}

static void stamp_owner_order(block_t *block)
{
  if (block->user == block->segment->heap->stream)
    block->stamp = stream_stamp(block->user);
}

/* What a claimed block owes from now on; the device's lock is dropped meanwhile. */
static void owe_outside(device_t *device, block_t *block)
{
  stamp_owner_order(block);
  if (!has_uses_at_free(block))
    return;
  unlock(&device->lock);
  record_uses_at_free(block);
  lock(&device->lock);
}

/* False: its capture is over, or it cannot be said what the block owes there. */
static bool owe_inside(device_t *device, block_t *block)
{
  place_t place;
  use_t *spare = use_take(device);
  unlock(&device->lock);
  captured_free_t how = capture_place_free(device->core, block, block->user, &place);
  if (how == FREED_INSIDE)
    place_uses_at_free(device->core, block);
  else
    record_uses_at_free(block);
  lock(&device->lock);
  bool known = how != FREED_OUTSIDE;
  if (how != FREED_INSIDE) {
    stamp_owner_order(block);
  } else if (spare && RULE(CAPTURED_FREE_HAS_PLACE)) {
    drop_use_of_user(device, block);
    use_attach_place(block, place, USE_AT_FREE, &spare);
    uses_unite_places(device, block);
  } else {
    known = spare != NULL;
    place_drop(&place);
  }
  if (spare)
    use_give(device, spare);
  return known;
}

/* A block of an earlier capture of the pool, freed inside a later one, as what a
 * forward graph saved is inside the backward one: what that graph does with it
 * comes before by the order of replays (rule 8), what its owner did outside was
 * waited for by the seal, and nothing was recorded there since. */
static bool joins_capture(block_t *block)
{
  const heap_t *home = block->segment->heap;
  if (!home->capture || !home->sealed_at || block->user != home->stream ||
      atomic_load(&home->stream->last) != home->sealed_at || !uses_have_completed(block))
    return false;
  block->capture = home->capture;
  block->stamp = 0;
  return true;
}

static bool count_reads_by_graphs(device_t *device, const block_t *block)
{
  for (const use_t *use = block->uses; use; use = use->next)
    if (use->flags & USE_CAPTURED) {
      device->counters.captured_frees++;
      return true;
    }
  return false;
}

static void warn_of_graph(core_t *core)
{
  const esper_config *given = &config_of(core)->as_given;
  if (given->warn && !atomic_exchange(&core->warned, true))
    given->warn(given->warn_context,
                "memory was freed that a CUDA graph reads, as a mark inside its capture says: "
                "unless that graph is gone, a replay reads what may be somebody else's by then. "
                "Keep such tensors for as long as the graph.");
}

esper_status heap_free(core_t *core, void *ptr)
{
  if (!ptr)
    return ESPER_OK;
  block_t *block = map_find(core->map, (uintptr_t)ptr);
  if (!block)
    return error_set(ESPER_INVALID, "%p does not start a block of this allocator", ptr);
  pool_t *pool = block->segment->heap->pool;
  device_t *device = pool->device;

  lock(&device->lock);
  if (block->state != BLOCK_LIVE || block->address != (uintptr_t)ptr) {
    unlock(&device->lock);
    return error_set(ESPER_INVALID, "%p was freed before", ptr);
  }
  stats_block_freed(&device->stats, block);
  trace_add(device, ESPER_TRACE_FREE_REQUESTED, block->address, block->requested,
            block->user);
  block->state = BLOCK_CLAIMED;
  bool read_by_graph = count_reads_by_graphs(device, block);
  const heap_t *home = block->segment->heap;
  bool at_home = !home->sealed && home->capture == block->capture;
  pool_enter(pool); /* which is not sealed meanwhile */
  if (block->capture && !at_home) {
    uses_drop_captured(device, block); /* the heap left that capture: it is over */
    at_home = joins_capture(block);
  }
  if (block->capture && at_home)
    at_home = owe_inside(device, block);
  else
    owe_outside(device, block);
  pool_leave(pool);
  block->withheld = !at_home && RULE(SEAL_BEFORE_REUSE);
  if (!pool->references)
    pool_note_work(pool);
  if (block->uses || block->withheld)
    free_blocks_add(block);
  else
    free_blocks_keep_warm(block);
  unlock(&device->lock);
  if (read_by_graph)
    warn_of_graph(core);
  return ESPER_OK;
}

/* ---- giving back ------------------------------------------------------- */

static bool is_idle(const segment_t *s)
{
  const block_t *block = s->first;
  if (block->next || (block->state != BLOCK_READY && block->state != BLOCK_PENDING))
    return false;
  if (s->captured && !RULE(GRAPHS_KEEP_MEMORY))
    return true;
  return pool_may_give_back(s) &&
         ((uses_have_completed(block) && owner_order_has_completed(block)) ||
          !RULE(RELEASE_NEEDS_COMPLETION));
}

static block_t *claim_idle_segment(device_t *device, const pool_t *pool, const pool_t *but)
{
  for (segment_t *s = device->first_segment; s; s = s->next)
    if ((!pool || s->heap->pool == pool) && s->heap->pool != but && is_idle(s)) {
      free_blocks_claim(s->first);
      free_blocks_satisfied(s->first);
      pool_enter(s->heap->pool);
      return s->first;
    }
  return NULL;
}

size_t heap_release(device_t *device, const pool_t *pool, const pool_t *but, size_t enough)
{
  size_t released = 0;
  bool going = true;
  seal_released(device);
  while (going && released < enough) {
    lock(&device->lock);
    block_t *block = claim_idle_segment(device, pool, but);
    pool_t *of = block ? block->segment->heap->pool : NULL;
    size_t size = block ? block->size : 0;
    unlock(&device->lock);
    going = block && segment_release(device, block);
    if (going)
      released += size;
    lock(&device->lock);
    if (of)
      pool_leave(of);
    pool_collect(device);
    unlock(&device->lock);
  }
  return released;
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
