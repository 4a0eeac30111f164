/* request.h: one malloc while it looks for memory, and its ends: a block is handed out or lent, or
 * memory is exhausted. Only for malloc*.c. */
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
  presented_t stream;
  uint64_t capture; /* 0: none */
  tag_t tag;        /* the thread's */
  size_t asked;     /* bytes */
  size_t size;      /* of the block */
  bool large;
  unsigned returned_before; /* how often other threads had returned memory before: in_flight.h */
  size_t ready_seen;        /* how many ready blocks the heap had when none of them served */
  bool missed;              /* its heap's block cache had nothing that serves */
  size_t addresses_missing; /* bytes of a fence for which live memory leaves no addresses; or 0 */
  bool deterministic;       /* its address repeats in every run: malloc_deterministic.h */
} request_t;

static inline run_t run_of_one(block_t *block)
{
  return block ? (run_t){block, block, block->size} : (run_t){0};
}

/* Whether pending memory comes before new memory: by the reuse order, and with `auto` by how much
 * memory is pending. Under the device's lock. */
bool request_gates_first(const request_t *q);
/* Which pending blocks the stream may then wait for. Under the device's lock. */
gate_choice_t request_gate_choice(const request_t *q);

static inline bool request_may_borrow(const request_t *q, const heap_t *heap)
{
  return heap != q->heap && !heap->capture && heap->tag == q->tag;
}

/* How much of `size` free bytes of the segment the request takes: what it needs, or everything if
 * the rest would not make a block. */
size_t request_share(const request_t *q, const segment_t *segment, size_t size);

/* Hands out a claimed block or run whose obligations are satisfied for the request's stream: makes
 * it live. The part that is not taken still owes what the block owed. Under the device's lock. */
void request_hand_out(const request_t *q, block_t *block);
block_t *request_hand_out_run(const request_t *q, run_t run);
/* Lends a claimed block or run of another heap. NULL: no host memory, and nothing has happened.
 * Under the device's lock. */
block_t *request_lend(const request_t *q, run_t run);

/* Hands out a ready block of the request's heap. `sparing`: not if a pending block should be taken
 * instead. NULL: none. Under the device's lock. */
block_t *request_take_ready(const request_t *q, bool sparing);

/* Counts and traces that the device is out of memory, and sets the error. */
esper_status request_fail(const request_t *q);
/* Counts that the request was rejected before the device was asked. */
esper_status request_reject(const request_t *q);

#endif
