/* request.h: one malloc while it looks for memory, and its ends: a block is handed out or lent, or
 * memory is exhausted. Only for malloc*.c and hold_back.c. */
#ifndef ESPER_REQUEST_H
#define ESPER_REQUEST_H

#include "../base/config.h"
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

/* Counts and traces that the device is out of memory, and sets the error. */
esper_status request_fail(const request_t *q);
/* Sets the error for a tag that sleeps. */
esper_status request_refuse_asleep(const device_t *device, tag_t tag);
/* Counts that the request was rejected before the device was asked. */
esper_status request_reject(const request_t *q);

#endif
