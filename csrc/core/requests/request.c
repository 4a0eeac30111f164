#include "request.h"

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "../blocks/trace.h"
#include "../blocks/use.h"
#include "../memory/failure.h"
#include "../memory/grow.h"
#include "../memory/segment.h"
#include "../order/capture.h"
#include "../order/capture_thread.h"
#include "../order/capturing.h"
#include "../pools/pool.h"
#include "drain.h"

/* ---- handing out ------------------------------------------------------- */

/* A small rest stays in its block. Not in mapped segments: there it will merge with what is freed
 * beside it. */
static size_t request_share(const request_t *q, const segment_t *segment, size_t size)
{
  bool coarse = segment->large && !segment->pages;
  bool splits = !segment->heap->pool->no_split && config_splits(q->config, size, q->size, coarse);
  return splits ? q->size : size;
}

void request_hand_out(const request_t *q, block_t *block)
{
  block_count_inactive(block);
  const segment_t *segment = block->segment;
  if (request_share(q, segment, block->size) < block->size) {
    cache_close(segment->heap);
    block_t *rest = block_split(q->device, block, q->size);
    if (rest)
      free_blocks_add(rest);
  }
  uses_drop(q->device, block);
  block->requested = q->asked;
  block_set_user(block, q->presented.stream);
  block->capture = q->capture;
  if (q->capture)
    block->segment->captured = true;
  block_set_state(block, BLOCK_LIVE);
  block->counted_active = true;
  block->oversize = config_is_oversize(q->config, block->size);
  block->plain = q->presented.stream == segment->heap->stream && !q->capture && !block->oversize &&
                 !segment->fenced;
  cache_count_allocated(block);
  cache_open(q->heap);
  trace_add(q->device, ESPER_TRACE_ALLOC, block->address, q->asked, q->presented.stream);
}

block_t *request_hand_out_new(const request_t *q, esper_status status, block_t *block)
{
  if (status != ESPER_OK)
    return NULL;
  lock(&q->device->lock);
  request_hand_out(q, block);
  unlock(&q->device->lock);
  return block;
}

/* The block gets a use by the borrower now, which ends at the free. A classic segment that is
 * wholly free and owes nothing moves to the request's heap instead. */
block_t *request_lend(const request_t *q, block_t *block)
{
  if (block_is_whole_segment(block) && !block->segment->pages) {
    uses_drop(q->device, block);
    block->stamp = 0;
    segment_move(block->segment, q->heap);
    request_hand_out(q, block);
    return block;
  }
  use_t *use = use_take(q->device);
  if (!use)
    return NULL;
  request_hand_out(q, block);
  if (RULE(LOAN_MAKES_USE))
    (void)use_attach(block, loan_stream(q->presented.stream), NULL, USE_BY_LOAN, &use);
  if (use)
    use_give(q->device, use);
  q->device->counters.loans++;
  return block;
}

block_t *request_take_ready(const request_t *q)
{
  /* Blocks stay in it for which a new configuration says that they are oversize. */
  bool skip = q->missed || config_is_oversize(q->config, q->size);
  block_t *warm = cache_take_or_close(q->heap, q->size, q->asked, skip);
  if (warm) {
    trace_add_block(q->device, ESPER_TRACE_ALLOC, warm, q->asked);
    return warm;
  }
  block_t *block = free_blocks_best_ready(q->heap, q->size, q->large);
  if (!block)
    return NULL;
  free_blocks_claim(block);
  request_hand_out(q, block);
  return block;
}

/* ---- none was found ----------------------------------------------------- */

static _Thread_local esper_failure last_failure;

void esper_get_failure(esper_failure *failure)
{
  *failure = last_failure;
}

/* The size of the block that the request would have got. */
static size_t wanted(const request_t *q)
{
  return q->size ? q->size : q->asked; /* no size: the request is too large to round */
}

static void note_failure(const request_t *q, size_t device_free, size_t device_total)
{
  device_t *device = q->device;
  shards_collect(device);
  size_t in_pools = 0;
  for (const segment_t *s = device->first_segment; s; s = s->next)
    if (s->heap->pool != device->default_pool)
      in_pools += s->bytes - s->absent;
  last_failure = (esper_failure){
      .device = device->index,
      .requested = q->asked,
      .size = wanted(q),
      .device_free = device_free,
      .device_total = device_total,
      .limit = device->limit,
      .allocated = (size_t)device->stats.allocated_bytes[ESPER_ALL].current,
      .private_pools = in_pools,
      .reserved = (size_t)device->stats.reserved_bytes[ESPER_ALL].current,
      .segment = q->size ? grow_size(q->pool, q->size) : 0,
      .addresses_missing = q->addresses_missing,
  };
}

/* Memory ran out. Asks the driver how much is free. */
static esper_status refuse_for_memory(const request_t *q)
{
  size_t device_free = 0, device_total = q->device->total;
  call_memory_info(q->core, q->device->index, &device_free, &device_total);
  lock(&q->device->lock);
  q->device->stats.num_ooms++;
  trace_add_memory(q->device, ESPER_TRACE_OOM, device_free, wanted(q), q->presented.stream);
  note_failure(q, device_free, device_total);
  unlock(&q->device->lock);
  if (q->addresses_missing)
    return error_set(ESPER_OUT_OF_MEMORY,
                     "live memory leaves no addresses for a fence of %zu bytes on device %d: free "
                     "some, or end the fence",
                     q->addresses_missing, q->device->index);
  return error_set(
      ESPER_OUT_OF_MEMORY,
      "out of memory on device %d: %zu bytes requested, %zu of %zu are free there, %zu "
      "are allocated, %zu reserved",
      q->device->index, q->asked, device_free, device_total, last_failure.allocated,
      last_failure.reserved);
}

static esper_status refuse_asleep(const device_t *device, tag_t tag)
{
  if (tag == TAG_NONE)
    return error_set(ESPER_ASLEEP,
                     "memory without a tag sleeps on device %d, so none is handed out: wake it "
                     "first, or allocate under a tag that is awake",
                     device->index);
  return error_set(ESPER_ASLEEP,
                   "memory tagged '%s' sleeps on device %d, so none is handed out: wake it first, "
                   "or allocate under another tag",
                   tag_name(tag), device->index);
}

/* The error is set already. */
static esper_status note_rejection(const request_t *q)
{
  lock(&q->device->lock);
  q->device->stats.num_oom_rejections++;
  note_failure(q, 0, q->device->total);
  unlock(&q->device->lock);
  return ESPER_REJECTED;
}

bool request_fell_asleep(const request_t *q)
{
  if (!atomic_load_explicit(&q->core->asleep, memory_order_relaxed))
    return false;
  lock(&q->device->lock);
  bool asleep = q->device->asleep[q->tag];
  unlock(&q->device->lock);
  return asleep;
}

esper_status request_refuse(const request_t *q, bool asleep, esper_status status)
{
  if (device_has_failed(q->device))
    return failure_check(q->device);
  if (asleep)
    return refuse_asleep(q->device, q->tag);
  return status == ESPER_OUT_OF_MEMORY ? refuse_for_memory(q)
         : status == ESPER_REJECTED    ? note_rejection(q)
                                       : status;
}

/* ---- its beginning ------------------------------------------------------- */

/* `attempt`: what cache_malloc found out about the stream, if it could. */
static esper_status present(core_t *core, esper_stream stream, cache_attempt_t attempt,
                            presented_t *presented)
{
  esper_status status = ESPER_OK;
  if (attempt.stream)
    *presented = stream_presented(attempt.stream, stream.handle);
  else
    status = stream_present(core, stream, presented);
  presented->asked |= attempt.asked; /* and the answer was that the stream is in no capture */
  if (status != ESPER_OK)
    capture_thread_refused(core); /* for frees in bodies of conditional nodes (rule 7i) */
  return status;
}

/* Which capture the request is in. Outside of any, held uses get their event now, because the
 * stream is presented. */
static esper_status find_capture(request_t *q)
{
  q->capture =
      RULE(CAPTURE_KEEPS_APART) ? stream_capture_of(q->presented, /* recording */ false) : 0;
  /* Without an answer, memory from inside a capture might be reused outside, or the reverse. */
  if (q->capture == CAPTURE_UNKNOWN) {
    capture_thread_note(q->capture, q->presented.stream);
    return error_from_driver(q->core, core_is(q->core, CORE_SHUT_DOWN) ? ESPER_SHUT_DOWN
                                                                       : ESPER_DEVICE_ERROR);
  }
  /* An invalidated capture never runs, so this malloc counts as outside of any. */
  if (q->capture == ESPER_CAPTURE_INVALID)
    q->capture = 0;
  if (q->capture)
    capture_thread_note(q->capture, q->presented.stream);
  else if (atomic_load_explicit(&q->presented.stream->holds, memory_order_relaxed))
    held_uses_record(q->core, q->presented);
  return ESPER_OK;
}

esper_status request_begin(request_t *q, pool_t *pool, size_t size, esper_stream stream,
                           cache_attempt_t attempt)
{
  core_t *core = pool->device->core;
  presented_t presented;
  esper_status status = present(core, stream, attempt, &presented);
  if (status != ESPER_OK)
    return status;
  const config_t *config = config_of(core);
  const size_t rounded = attempt.size ? attempt.size : config_round(config, size);
  /* Every field is named: to clear the request first would take as long as taking the lock. */
  *q = (request_t){.core = core,
                   .device = pool->device,
                   .pool = pool,
                   .heap = NULL,
                   .config = config,
                   .presented = presented,
                   .capture = 0,
                   .tag = tag_current(),
                   .asked = size,
                   .size = rounded,
                   .large = config_is_large(rounded),
                   .missed = attempt.missed,
                   .addresses_missing = 0};
  return rounded ? find_capture(q) : refuse_for_memory(q); /* 0: too large to be rounded */
}

heap_t *request_heap(const request_t *q)
{
  heap_t *heap = pool_find_or_make_heap(q->pool, q->presented.stream, q->capture, q->tag);
  if (heap && q->capture && !heap->branch)
    heap->branch = capture_branch(q->core, q->presented.stream, q->capture);
  return heap && q->capture && !heap->branch ? NULL : heap;
}
