/* malloc.c: malloc. Each function stands before its callers, so begin with malloc_block, at the
 * end. A request_t (request.h) is one malloc on its way through the steps.
 *
 * cache_malloc, called in api/memory.c, tries the heap's block cache without the device's lock. If
 * that has nothing, or a filter of an open pool may take the request (pools/routing.h),
 * malloc_block does step 1, and steps_2_to_8 the others until one yields a block. If none does,
 * `status` says why. The steps:
 *   1. request_take_ready: a ready block of the stream's heap, or of its cache if not tried before
 *   2. take_retired: the same after retiring events
 *   3. borrow: another heap of the pool lends a block that owes nothing. After many loans of small
 *      blocks, step 5 comes first
 *   4. hold_back: if the heap's awaited bytes and the request exceed the allowance, the host waits
 *      for the oldest awaited work; then steps 2 to 4 again
 *   5. take_grown: new memory, unless callbacks free some that serves (call_free_memory). An error
 *      other than ESPER_OUT_OF_MEMORY (ESPER_REJECTED: segment.h) ends malloc here, but not in step
 *      8 or before step 3
 *   6. call_free_memory: the callbacks, told that memory is short; then steps 2 to 5 again
 *   7. find_in_pools_on_oom: for the default pool, memory of pools with use_on_oom
 *   8. wait_and_release: the host waits for events, with steps 2 and 3 after each. It drains the
 *      device, and tries steps 2, 3 and 7. Then unused memory goes back, and the heap grows. At
 *      last take_returned waits for pages that a sleep is sending, and tries once more
 *
 * No step makes a stream wait (rule 2). Step 1 runs under the device's lock, and the others take it
 * themselves. They hold it during no wait and no driver call.
 *
 * Inside a capture, malloc_take_inside replaces steps 2 to 4. It takes memory that the stream freed
 * there, or that the pool had when quiesced. New memory, step 6 and take_returned follow. The host
 * waits for no event.
 *
 * Memory with a fence (esper_fence) is always new: malloc_fenced.c replaces all these steps.
 * hold_back.c has the waits of steps 4 and 8, and release.c gives memory back. request.c begins and
 * ends a request. */
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

/* A loan costs more time than a block of the heap's own. After MANY loans of small blocks the heap
 * grows by new pages instead: creating them takes no longer than those loans. */
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

/* Tries each heap's best fit. Adds the work that this block waits for to `probes`. A private pool
 * with graphs lends nothing, because replays touch its memory at any time. Under the device's
 * lock. */
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
      /* Step 2 asked about its uses. Owner order is left. */
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
 * driver is asked about `probes`, and the heaps are searched again. */
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

static block_t *steps_2_and_3(const request_t *q)
{
  block_t *block = take_retired(q);
  return block ? block : borrow(q);
}

/* `wait` is hold_back (step 4) or wait_for_oldest (step 8). After each wait come steps 2 and 3. It
 * ends with a block, when `wait` returns false, or after most_waits. */
static block_t *wait_and_find(const request_t *q, bool (*wait)(const request_t *))
{
  block_t *block = NULL;
  for (unsigned left = most_waits(q); left && !block && wait(q); left--)
    block = steps_2_and_3(q);
  return block;
}

/* One thread grows at a time: others cannot find memory that is being moved. A MemPool's own
 * allocator (`source`) is called without the lock, because it may wait for another thread. */
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

/* Step 7. Walks to the end, so that pool_next_on_oom leaves each pool that it entered. */
static block_t *find_in_pools_on_oom(const request_t *q)
{
  block_t *block = NULL;
  if (q->pool != q->device->default_pool)
    return NULL;
  for (pool_t *pool = NULL; (pool = pool_next_on_oom(q->device, pool));) {
    if (block)
      continue;
    request_t there = *q; /* `missed` is harmless: such pools have no cache */
    there.pool = pool;
    lock(&q->device->lock);
    there.heap = pool_find_or_make_heap(pool, q->presented.stream, 0, q->tag);
    unlock(&q->device->lock);
    if (there.heap)
      block = steps_2_and_3(&there);
  }
  return block;
}

/* Gives unused memory back, and takes new memory in its place. */
static block_t *release_and_grow(const request_t *q, size_t enough, esper_status *status)
{
  size_t released =
      release_cached(q->device, /* every pool */ NULL, /* mind_captures */ false, enough);
  return released ? take_grown(q, ANY_PAGES, status) : NULL;
}

/* After a drain: steps 2, 3 and 7. Then gives back as much unused memory as is needed, at last all,
 * and grows. */
static block_t *find_drained(const request_t *q, esper_status *status)
{
  block_t *block;
  if ((block = steps_2_and_3(q)) || (block = find_in_pools_on_oom(q)))
    return block;
  block = release_and_grow(q, grow_size(q->pool, q->size), status);
  return block ? block : release_and_grow(q, SIZE_MAX, status);
}

/* The end of step 8, and of a capture's steps. Waits for a sleep that is under way, and tries once
 * more. Where growth_begin locks, no other thread grows or gives memory back meanwhile. */
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

/* Step 8. Before it fails, it waits without limit for work that did not complete in time. */
static block_t *wait_and_release(const request_t *q, esper_status *status)
{
  block_t *block = wait_and_find(q, wait_for_oldest);
  if (block)
    return block;
  lock(&q->device->lock);
  q->device->stats.num_alloc_retries++;
  q->device->stats.num_sync_all_streams++;
  slack_was_refused(q->device); /* no slack is created while memory is short */
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
  if (call_free_memory(q, /* short_of_memory */ false) && (block = steps_2_and_3(q)))
    return block;
  return take_grown(q, ANY_PAGES, status);
}

static block_t *steps_2_to_8(const request_t *q, esper_status *status)
{
  block_t *block = steps_2_to_5(q, status);
  if (!block && *status == ESPER_OUT_OF_MEMORY && call_free_memory(q, /* short_of_memory */ true))
    block = steps_2_to_5(q, status);
  if (block || *status != ESPER_OUT_OF_MEMORY)
    return block;
  if (q->capture)
    return take_returned(q, status);
  return (block = find_in_pools_on_oom(q)) ? block : wait_and_release(q, status);
}

/* All steps but the first. If the tag fell asleep or the device failed meanwhile, the block is
 * freed again. Without the device's lock. */
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
    return request_refuse(&q, /* asleep */ true, ESPER_OK); /* it checks for failure first */
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
