/* request.h: one malloc: its beginning, its state, and its ends: a block is handed out or lent, or
 * none is found. Only for malloc*.c and hold_back.c. */
#ifndef ESPER_REQUEST_H
#define ESPER_REQUEST_H

#include "../base/config.h"
#include "../blocks/block_cache.h"
#include "../blocks/free_blocks.h"
#include "../order/stream.h"

typedef struct request {
  core_t *core;
  device_t *device;
  pool_t *pool;
  heap_t *heap; /* the stream's heap: home of the block, unless it is lent */
  const config_t *config;
  presented_t presented; /* the stream */
  uint64_t capture;      /* 0: none */
  tag_t tag;             /* the thread's */
  size_t asked;          /* bytes */
  size_t size;           /* of the block */
  bool large;
  bool missed;              /* its heap's block cache had nothing that serves */
  size_t addresses_missing; /* bytes of a fence for which live memory leaves no addresses; or 0 */
} request_t;

/* Presents the stream, finds out which capture it is in, and rounds the size. An error is set where
 * the request may not begin. The heap is still missing: see request_heap. */
esper_status request_begin(request_t *q, pool_t *pool, size_t size, esper_stream stream,
                           cache_attempt_t attempt);
/* Finds or makes the stream's heap. NULL: no host memory for it or, in a capture, for its branch.
 * Under the device's lock. */
heap_t *request_heap(const request_t *q);

static inline bool request_may_borrow(const request_t *q, const heap_t *heap)
{
  return heap != q->heap && !heap->capture && heap->tag == q->tag;
}

/* Hands out a claimed block whose obligations are satisfied for the request's stream: makes it
 * live. The part that is not taken still owes what the block owed. Under the device's lock. */
void request_hand_out(const request_t *q, block_t *block);
/* The same for a block of new memory, if the status is ESPER_OK; else NULL. No lock is held but the
 * growth lock. */
block_t *request_hand_out_new(const request_t *q, esper_status status, block_t *block);
/* Lends a claimed block of another heap, which owes nothing. NULL: no host memory, and nothing has
 * happened. Under the device's lock. */
block_t *request_lend(const request_t *q, block_t *block);

/* Hands out a ready block of the request's heap: from its block cache, unless that `missed`, or its
 * bins. NULL: none. Under the device's lock. */
block_t *request_take_ready(const request_t *q);

/* Whether another thread has put the request's tag to sleep since it began. */
bool request_fell_asleep(const request_t *q);
/* Sets the error of a request that got no block: the device failed, the tag is `asleep`, or the
 * `status` of its steps. Counts and traces that memory ran out, or that a limit rejected it. */
esper_status request_refuse(const request_t *q, bool asleep, esper_status status);

#endif
