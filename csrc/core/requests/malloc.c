/* malloc.c: malloc. Each function stands before its callers, so begin with malloc_block, at the
 * end. A request_t (request.h) is one malloc on its way through the steps.
 *
 * cache_malloc, called in api/memory.c, tries the heap's block cache without the device's lock. If
 * that has nothing, or a filter of an open pool may claim the request (pools/routing.h),
 * malloc_block does step 1. The others follow in the order that steps_2_to_8, steps_2_to_5 and
 * wait_and_release give them, until one yields a block. If none does, `status` says why:
 *   1. request_take_ready: a ready block of its own heap, or of that heap's cache if cache_malloc
 *      did not try it
 *   2. take_retired: the same after retiring events
 *   3. borrow: a block of another heap of the pool, which owes nothing, lent. If the heap has
 *      borrowed many small blocks, step 5 is tried first
 *   4. hold_back: if the heap's awaited bytes and the request exceed the allowance, the host waits
 *      for the oldest work that these bytes wait for; then steps 2 to 4 again
 *   5. take_grown: new memory, if registered callbacks free none (call_free_memory). Malloc gives
 *      up if the driver fails or PyTorch's limit for requests rejects it (segment.h), but not
 *      within step 8, nor where step 5 comes before step 3
 *   6. call_free_memory: the callbacks again, now short of memory; then steps 2 to 5 again
 *   7. find_in_pools_on_oom: for the default pool, memory of pools with use_on_oom
 *   8. wait_and_release: the host waits for one event after another, then drains the device, and
 *      tries steps 2, 3 and 7 again. Then cached memory goes back to the driver, and new memory is
 *      created. At last take_returned waits for pages that a sleep is sending, and tries once more
 *
 * No step makes a stream wait (rule 2). Step 1 runs under the device's lock, and the others take it
 * themselves; the host waits without it, and driver calls are made without it, on claimed blocks.
 * Inside a capture three kinds of memory serve: what the stream itself freed in it, what its pool
 * had when that pool was quiesced, and new memory; then step 6 and take_returned. There the host
 * waits for no event.
 *
 * Memory with a fence (esper_fence) is always new: malloc_fenced.c instead of all these steps.
 * malloc_capture.c has the steps inside a capture, hold_back.c the waits of steps 4 and 8.
 * request.c begins and ends a request, and release.c gives memory back to the driver. */
#include "malloc.h"

#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/use.h"
#include "../memory/failure.h"
#include "../memory/grow.h"
#include "../memory/slack.h"
#include "../order/retire.h"
#include "../pools/pool.h"
#include "drain.h"
#include "free.h"
#include "hold_back.h"
#include "malloc_capture.h"
#include "malloc_fenced.h"
#include "release.h"
#include "request.h"

/* ---- the steps of malloc ----------------------------------------------- */

/* Step 2. */
static block_t *take_retired(const request_t *q)
{
  stream_retire_all(q->core);
  lock(&q->device->lock);
  free_blocks_promote(q->heap);
  block_t *block = request_take_ready(q);
  unlock(&q->device->lock);
  return block;
}

/* A loan costs more time than a block of the heap's own. After so many loans of small blocks the
 * heap grows instead: to create a small segment takes no longer than those loans did. Then the
 * count begins again. */
static bool borrows_too_often(const request_t *q)
{
  enum { MANY = 32 };
  lock(&q->device->lock);
  bool often = !q->large && q->heap->borrowed >= MANY;
  if (often)
    q->heap->borrowed = 0; /* it may borrow again, even if it cannot grow now */
  unlock(&q->device->lock);
  return often;
}

/* Looks at the best fit of each heap. Adds to `probes` the work that each best fit waits for. A
 * private pool with graphs lends nothing, because replays touch its memory at any time. Under the
 * device's lock. */
static block_t *borrow_from_heaps(const request_t *q, probes_t *probes)
{
  if (q->pool != q->device->default_pool && pool_has_graphs(q->pool) && RULE(GRAPHS_KEEP_MEMORY))
    return NULL;
  for (heap_t *heap = q->pool->heaps; heap; heap = heap->next) {
    if (!request_may_borrow(q, heap))
      continue;
    free_blocks_promote(heap);
    block_t *block = free_blocks_best_ready(heap, q->size, q->large);
    if (!block)
      continue;
    if (!block_owes_nothing(block) && RULE(LOAN_NEEDS_COMPLETION)) {
      /* Step 2 has asked about its uses. Its owner order is left. */
      probes_add(probes, owner_order_stream(heap), block->stamp);
      continue;
    }
    free_blocks_claim(block);
    if (request_lend(q, block)) {
      q->heap->borrowed += !q->large;
      return block;
    }
    free_blocks_add(block);
  }
  return NULL;
}

/* Step 3. Work of other streams has often completed unnoticed. So if nothing can be lent, the
 * driver is asked about the work that the best fits wait for, and the heaps are searched again. */
static block_t *borrow(const request_t *q)
{
  for (bool asked = false;; asked = true) {
    probes_t probes;
    probes.count = 0;
    lock(&q->device->lock);
    block_t *block = borrow_from_heaps(q, &probes);
    unlock(&q->device->lock);
    if (block || asked || !probes.count)
      return block;
    probes_ask(&probes, q->core, /* patient */ false);
  }
}

/* Steps 2 and 3. */
static block_t *steps_2_and_3(const request_t *q)
{
  block_t *block = take_retired(q);
  return block ? block : borrow(q);
}

/* The host waits by `wait`: hold_back (step 4) or wait_for_oldest (step 8). After each wait come
 * steps 2 and 3. It ends with a block, a wait in vain, or after most_waits. */
static block_t *wait_and_find(const request_t *q, bool (*wait)(const request_t *))
{
  block_t *block = NULL;
  for (unsigned left = most_waits(q); left && !block && wait(q); left--)
    block = steps_2_and_3(q);
  return block;
}

/* One thread at a time: while a heap grows, others cannot find the memory that it moves. A
 * MemPool's own allocator (`source`) is called without the lock, because it may wait for another
 * thread. */
static void growth_begin(const request_t *q)
{
  if (!q->pool->source.obtain)
    lock(&q->device->growth_lock);
}

static void growth_end(const request_t *q)
{
  if (!q->pool->source.obtain)
    unlock(&q->device->growth_lock);
}

/* Grows, and hands out the new block or one that another thread freed meanwhile. */
static block_t *grow_and_hand_out(const request_t *q, pages_from_t from, esper_status *status)
{
  block_t *block = NULL;
  *status = grow(q->heap, q->size, q->large, from, &block);
  return request_hand_out_new(q, *status, block);
}

/* Step 5. */
static block_t *take_grown(const request_t *q, pages_from_t from, esper_status *status)
{
  growth_begin(q);
  block_t *block = grow_and_hand_out(q, from, status);
  growth_end(q);
  return block;
}

/* Step 7. Walks to the end: each call of pool_next_on_oom also leaves the pool before. */
static block_t *find_in_pools_on_oom(const request_t *q)
{
  block_t *block = NULL;
  if (q->pool != q->device->default_pool)
    return NULL;
  for (pool_t *pool = NULL; (pool = pool_next_on_oom(q->device, pool));) {
    if (block)
      continue;
    request_t there = *q; /* but for its cache: such pools have none */
    there.pool = pool;
    lock(&q->device->lock);
    there.heap = pool_find_or_make_heap(pool, q->presented.stream, 0, q->tag);
    unlock(&q->device->lock);
    if (there.heap)
      block = steps_2_and_3(&there);
  }
  return block;
}

/* Gives cached memory back to the driver, and takes new memory in its place. */
static block_t *release_and_grow(const request_t *q, size_t enough, esper_status *status)
{
  size_t released =
      release_cached(q->device, /* every pool */ NULL, /* mind_captures */ false, enough);
  return released ? take_grown(q, ANY_PAGES, status) : NULL;
}

/* After drain_without_embedder: takes what has completed; or gives cached memory back, at first
 * only as much as is needed, and grows. */
static block_t *find_drained(const request_t *q, esper_status *status)
{
  block_t *block;
  if ((block = steps_2_and_3(q)) || (block = find_in_pools_on_oom(q)))
    return block;
  block = release_and_grow(q, grow_size(q->pool, q->size), status);
  return block ? block : release_and_grow(q, SIZE_MAX, status);
}

/* The end of step 8, and of a capture's steps. Waits for a sleep that is under way, and tries once
 * more under the growth lock, so that no other thread grows or gives memory back meanwhile. (A
 * MemPool's own allocator does without that lock.) */
static block_t *take_returned(const request_t *q, esper_status *status)
{
  wait_for_sleep_without_embedder(q);
  growth_begin(q);
  block_t *block = q->capture ? malloc_take_inside(q) : steps_2_and_3(q);
  if (!block)
    block = grow_and_hand_out(q, ANY_PAGES, status);
  growth_end(q);
  return block;
}

/* Step 8. Before it fails, it waits without a limit for work that did not complete in time. */
static block_t *wait_and_release(const request_t *q, esper_status *status)
{
  block_t *block = wait_and_find(q, wait_for_oldest);
  if (block)
    return block;
  lock(&q->device->lock);
  q->device->stats.num_alloc_retries++;
  q->device->stats.num_sync_all_streams++;
  slack_was_refused(q->device); /* no page is created for slack while memory is short */
  unlock(&q->device->lock);
  bool in_time = drain_without_embedder(q, DRAIN_LIMITED) != ESPER_NOT_READY;
  block = find_drained(q, status);
  if (!block && !in_time) {
    drain_without_embedder(q, 0);
    block = find_drained(q, status);
  }
  return block ? block : take_returned(q, status);
}

/* ---- malloc ------------------------------------------------------------ */

/* Steps 2 to 5. */
static block_t *steps_2_to_5(const request_t *q, esper_status *status)
{
  block_t *block;
  if (q->capture)
    return (block = malloc_take_inside(q)) ? block : take_grown(q, ANY_PAGES, status);
  if ((block = take_retired(q)))
    return block;
  if (borrows_too_often(q) && (block = take_grown(q, NEW_PAGES, status)))
    return block;
  if ((block = borrow(q)) || (block = wait_and_find(q, hold_back)))
    return block;
  if (call_free_memory(q, false) && (block = steps_2_and_3(q)))
    return block;
  return take_grown(q, ANY_PAGES, status);
}

/* Steps 2 to 8. */
static block_t *steps_2_to_8(const request_t *q, esper_status *status)
{
  block_t *block = steps_2_to_5(q, status);
  if (!block && *status == ESPER_OUT_OF_MEMORY && call_free_memory(q, true))
    block = steps_2_to_5(q, status);
  if (block || *status != ESPER_OUT_OF_MEMORY)
    return block;
  if (q->capture)
    return take_returned(q, status);
  return (block = find_in_pools_on_oom(q)) ? block : wait_and_release(q, status);
}

/* All steps but the first. If the tag fell asleep or the device failed meanwhile, the block is
 * freed again. The device's lock is not held. */
static esper_status find_block(request_t *q, bool fenced, block_t **block)
{
  esper_status status = ESPER_OK;
  if (!q->heap)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a heap");
  *block = fenced ? malloc_take_fenced(q, &status) : steps_2_to_8(q, &status);
  if (atomic_load_explicit(&q->core->ended_a_capture, memory_order_relaxed))
    malloc_warn_of_ended_capture(q->core);
  bool asleep = request_fell_asleep(q);
  if (*block && (asleep || device_has_failed(q->device))) {
    free_block(q->core, (void *)(*block)->address);
    *block = NULL;
  }
  return *block ? ESPER_OK : request_refuse(q, asleep, status);
}

esper_status malloc_block(pool_t *pool, size_t size, esper_stream stream, cache_attempt_t attempt,
                          void **ptr)
{
  *ptr = NULL;
  if (!size)
    return ESPER_OK;
  request_t q;
  esper_status status = request_begin(&q, pool, size, stream, attempt);
  if (status != ESPER_OK)
    return status;

  device_t *device = q.device;
  block_t *block = NULL;
  lock(&device->lock);
  if (device->asleep[q.tag] || device_has_failed(device)) {
    unlock(&device->lock);
    return request_refuse(&q, /* asleep */ true, ESPER_OK); /* or the device has failed */
  }
  q.heap = request_heap(&q);
  bool fenced = core_is(q.core, CORE_FENCED) && pool == device->default_pool && !q.capture;
  if (q.heap && !fenced)
    block = request_take_ready(&q); /* step 1 */
  unlock(&device->lock);
  if (!block && (status = find_block(&q, fenced, &block)) != ESPER_OK)
    return status;
  *ptr = (void *)block->address;
  return ESPER_OK;
}
