#include "quiesce.h"

#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/pending_index.h"
#include "../blocks/use.h"
#include "../memory/segment.h"
#include "../order/capturing.h"
#include "../order/host_wait.h"
#include "../order/record.h"
#include "../order/retire.h"
#include "../order/stream.h"
#include "../pools/pool.h"

/* ---- waiting ------------------------------------------------------------ */

enum { REFUSED = 64 }; /* the most streams that are remembered because they cannot be waited for */

/* A stream that cannot be waited for, and is not tried again. If no event could be recorded on it,
 * events recorded earlier may still be waited for. */
typedef struct refused {
  const stream_t *stream;
  bool owner_order; /* only its owner order cannot be waited for */
} refused_t;

/* One wait for one stream, up to the last of its work that some block owes. */
typedef struct wait {
  stream_t *stream;         /* NULL: nothing to wait for */
  uint64_t number;          /* its work up to here */
  record_t *record;         /* the record with that number; NULL: the wait is for owner order */
  const refused_t *refused; /* streams that cannot be waited for */
  int count;
} wait_t;

static bool is_refused(const wait_t *wait, const stream_t *stream, const record_t *record)
{
  for (int i = 0; i < wait->count; i++)
    if (wait->refused[i].stream == stream && !(record && wait->refused[i].owner_order))
      return true;
  return false;
}

/* Adds work to the wait. The first call decides the stream; work of other streams is ignored. */
static void need(wait_t *wait, stream_t *stream, uint64_t number, record_t *record)
{
  if (wait->stream && (wait->stream != stream || wait->number >= number))
    return;
  if (is_refused(wait, stream, record))
    return;
  if (record)
    record_keep(record);
  if (wait->record)
    record_drop(wait->record);
  wait->stream = stream;
  wait->number = number;
  wait->record = record;
}

static void need_all(wait_t *wait, const block_t *block)
{
  if (!owner_order_has_completed(block))
    need(wait, owner_order_stream(block->segment->heap), block->stamp, NULL);
  for (const use_t *use = block->uses; use; use = use->next) {
    if (use_has_completed(use))
      continue;
    if (use->record)
      need(wait, use->stream, use->record->number, use->record);
    else if (use->stamp && !(use->stream->all_streams && !use_is_loan(use)))
      need(wait, use->stream, use->stamp, NULL);
  }
}

static bool find_wait(wait_t *wait, pool_t *pool)
{
  device_t *device = pool->device;
  lock(&device->lock);
  for (const segment_t *s = device->first_segment; s; s = s->next)
    for (const block_t *b = s->first; b && s->heap->pool == pool; b = b->next)
      if (!block_is_live_or_claimed(b))
        need_all(wait, b);
  unlock(&device->lock);
  return wait->stream;
}

static void wait_for_obligations(pool_t *pool)
{
  refused_t refused[REFUSED];
  wait_t wait = {.refused = refused};
  while (wait.count < REFUSED && find_wait(&wait, pool)) {
    if (!wait.record)
      wait.record = stream_probe(wait.stream, wait.number);
    if (!wait.record || record_wait_trusting(wait.record) != ESPER_OK)
      refused[wait.count++] = (refused_t){wait.stream, !wait.record};
    if (wait.record)
      record_drop(wait.record);
    wait = (wait_t){.refused = refused, .count = wait.count};
  }
}

static bool has_live_captured(const heap_t *heap)
{
  for (const segment_t *s = heap->device->first_segment; s; s = s->next)
    for (const block_t *b = s->first; b && s->heap == heap; b = b->next)
      if (b->state == BLOCK_LIVE && b->capture)
        return true;
  return false;
}

/* Whether some block still owes owner order, because no event stood for all streams, or the host
 * may not wait for them. Notes it in the probes. */
static bool owes_owner_order(const heap_t *heap, probes_t *probes)
{
  bool owes = false;
  for (const segment_t *s = heap->device->first_segment; s; s = s->next)
    for (const block_t *b = s->first; b && s->heap == heap; b = b->next)
      if (block_is_in_bin(b) && !owner_order_has_completed(b)) {
        probes_add(probes, owner_order_stream(heap), b->stamp);
        owes = true;
      }
  return owes;
}

/* Live memory of captures that are over may be freed inside the next capture, where its owner
 * cannot be waited for. So the host waits for the owners now. It does that, too, where it could not
 * wait for all streams: then the heap's own stream may have the memory. */
static void wait_for_owners(pool_t *pool)
{
  device_t *device = pool->device;
  probes_t probes;
  probes.count = 0;
  lock(&device->lock);
  heap_t *heap = pool->heaps;
  unlock(&device->lock);
  for (; heap; heap = heap->next) {
    lock(&device->lock);
    bool needed = (RULE(QUIESCE_NEEDS_COMPLETION) && owes_owner_order(heap, &probes)) ||
                  has_live_captured(heap);
    unlock(&device->lock);
    stream_t *s = heap->stream;
    uint64_t to = needed ? stream_pass(owner_order_stream(heap)) : 0;
    record_t *record = needed ? stream_probe(s, stream_stamp(s)) : NULL;
    bool waited = record && record_wait_trusting(record) == ESPER_OK;
    lock(&device->lock);
    heap->quiesced_at = waited ? record->number : 0;
    heap->quiesced_to = waited ? to : 0;
    unlock(&device->lock);
    if (record)
      record_drop(record);
  }
  probes_ask(&probes, device->core, true);
}

/* ---- quiescing ----------------------------------------------------------- */

/* A stream stays in its capture until that is over. A mortal stream cannot be asked, and the driver
 * may fail to answer; then the capture counts as going on. */
static bool capture_is_over(stream_t *s, uint64_t capture)
{
  presented_t as = {.stream = s, .handle = s->handle};
  uint64_t now = s->immortal ? stream_capture_of(as, true) : capture;
  return now != capture && now != CAPTURE_UNKNOWN;
}

/* New heaps are put first in the list, and none goes while the pool is being begun. */
static void find_captures_over(pool_t *pool)
{
  device_t *device = pool->device;
  lock(&device->lock);
  heap_t *heap = pool->heaps;
  unlock(&device->lock);
  for (; heap; heap = heap->next) {
    lock(&device->lock);
    uint64_t capture = heap->capture;
    unlock(&device->lock);
    bool over = capture && capture_is_over(heap->stream, capture);
    lock(&device->lock);
    heap->over = over;
    unlock(&device->lock);
  }
}

static void clear(block_t *block)
{
  uses_drop(block->segment->heap->device, block);
  block->stamp = 0;
  block->withheld = false;
}

/* Whether the block may serve its heap's stream: the host has waited for what that stream was given
 * before the free. Others get it only if it owes no owner order either. */
static bool serves_own_stream(const block_t *block)
{
  const heap_t *heap = block->segment->heap;
  return uses_have_completed(block) &&
         (owner_order_has_completed(block) || block->stamp <= heap->quiesced_to);
}

static void quiesce_heap(heap_t *heap)
{
  device_t *device = heap->device;
  pool_heap_leave_capture(heap);
  for (segment_t *s = device->first_segment; s; s = s->next)
    for (block_t *b = s->first; b && s->heap == heap; b = b->next) {
      if (b->state != BLOCK_LIVE)
        uses_drop_captured(device, b);
      if (b->state != BLOCK_READY)
        continue;
      if (block_owes_nothing(b) || !RULE(QUIESCE_NEEDS_COMPLETION)) {
        clear(b);
      } else if (!serves_own_stream(b)) {
        free_blocks_claim(b);
        b->withheld = true;
        free_blocks_add(b);
      }
    }
  for (block_t *b = heap->oldest_pending, *newer; b; b = newer) {
    newer = b->newer;
    uses_hold_unrecorded(device, b);
    bool serves = serves_own_stream(b) || !RULE(QUIESCE_NEEDS_COMPLETION);
    if (!serves && b->withheld)
      continue;
    free_blocks_claim(b);
    if (!serves) {
      b->withheld = true; /* its owner order may complete after its uses */
      free_blocks_add(b);
      continue;
    }
    uint64_t stamp = block_owes_nothing(b) || !RULE(QUIESCE_NEEDS_COMPLETION) ? 0 : b->stamp;
    clear(b);
    b->stamp = stamp;
    free_blocks_add(b);
  }
  heap->quiesced = true;
}

/* Moves all memory of `from` to `into`, a heap of the same stream. */
static void unite(heap_t *into, heap_t *from)
{
  device_t *device = into->pool->device;
  for (segment_t *s = device->first_segment; s; s = s->next) {
    if (s->heap != from)
      continue;
    for (block_t *b = s->first; b; b = b->next)
      if (block_is_in_bin(b))
        free_blocks_claim(b);
    segment_move(s, into);
    /* A block may merge with the one before it, and is gone then. */
    for (block_t *b = s->first, *next; b; b = next) {
      next = b->next;
      if (b->state == BLOCK_CLAIMED)
        free_blocks_add(b);
    }
  }
  into->quiesced_at = 0; /* the two heaps were waited for at different numbers */
  pool_destroy_heap(from);
}

static heap_t *heap_like(heap_t *heap)
{
  for (heap_t *other = heap->next; other; other = other->next)
    if (other->stream == heap->stream && other->tag == heap->tag && other->quiesced)
      return other;
  return NULL;
}

/* Gives a stream that was in several captures one heap again. */
static void unite_quiesced(pool_t *pool)
{
  for (heap_t *heap = pool->heaps, *like; heap; heap = heap->next)
    while (heap->quiesced && (like = heap_like(heap)))
      unite(heap, like);
}

void quiesce_pool(pool_t *pool)
{
  device_t *device = pool->device;
  stream_retire_all(device->core);
  find_captures_over(pool);
  if (RULE(QUIESCE_NEEDS_COMPLETION))
    wait_for_obligations(pool);
  wait_for_owners(pool);
  stream_retire_all(device->core); /* work that could not be waited for may be over by now */
  lock(&device->lock);
  /* A call that is working in the pool must not lose its heap: then nothing is quiesced. */
  if (!pool->busy) {
    for (heap_t *heap = pool->heaps; heap; heap = heap->next)
      if (!heap->capture || heap->over)
        quiesce_heap(heap);
    unite_quiesced(pool);
  }
  unlock(&device->lock);
}

/* ---- pools that are gone ------------------------------------------------- */

/* Drops what the pool's memory owes to its graphs, and quiesces it. Frees nothing. */
static void forget_obligations(pool_t *pool)
{
  for (const segment_t *s = pool->device->first_segment; s; s = s->next)
    for (block_t *b = s->first; b && s->heap->pool == pool; b = b->next)
      if (block_is_in_bin(b)) {
        uses_drop_unrecorded(pool->device, b);
        if (b->state == BLOCK_PENDING)
          pending_index_add(s->heap, b);
      }
  for (heap_t *heap = pool->heaps; heap; heap = heap->next)
    quiesce_heap(heap);
  unite_quiesced(pool);
}

void quiesce_unreferenced(device_t *device, const pool_t *ours)
{
  lock(&device->lock);
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    if (!pool->references && !pool->open && pool->busy <= (pool == ours) &&
        stream_completed(device->all_streams, pool->released))
      forget_obligations(pool);
  unlock(&device->lock);
}
