/* request.h: one malloc on its way, and how it ends: with a block handed out or lent, or with the
 * report that memory is exhausted. For heap*.c alone. */
#ifndef ESPER_REQUEST_H
#define ESPER_REQUEST_H

#include "../base/config.h"
#include "../blocks/free_blocks.h"
#include "../order/stream.h"

typedef struct request {
  core_t *core;
  device_t *device;
  pool_t *pool;
  heap_t *heap; /* home of what is handed out, unless it is lent */
  const config_t *config;
  presented_t stream;
  uint64_t capture; /* 0: none */
  size_t asked;     /* bytes */
  size_t size;      /* of the block */
  bool large;
  unsigned left;      /* by others, when it began: hands.h */
  size_t ready_seen;  /* ready blocks of the heap and size class when none served */
  bool missed;        /* its heap's front was looked at, and had nothing */
  bool deterministic; /* what serves it depends on the calls alone: malloc_deterministic.h */
} request_t;

static inline run_t run_of_one(block_t *block)
{
  return block ? (run_t){block, block, block->size} : (run_t){0};
}

/* Reuse orders `gate` and `auto`. */
static inline bool request_gates_first(const request_t *q)
{
  return q->config->as_given.reuse_order != ESPER_REUSE_GROW;
}

static inline bool request_may_borrow(const request_t *q, const heap_t *heap)
{
  return heap != q->heap && !heap->capture;
}

/* How much the request takes of `size` free bytes of the segment: what it needs, or all where the
 * rest is not worth a block. */
size_t request_share(const request_t *q, const segment_t *segment, size_t size);

/* These three under the device's lock. A claimed block, or run, that is satisfied for the request's
 * stream becomes live; what it owed stays with the part that is not taken. */
void request_hand_out(const request_t *q, block_t *block);
block_t *request_hand_out_run(const request_t *q, run_t run);
/* ... of another heap. NULL: no host memory, and nothing has happened. */
block_t *request_lend(const request_t *q, run_t run);

/* Hands out a ready block of the request's heap; `sparing`, none that a pending one should be taken
 * instead of. NULL: none. Under the device's lock. */
block_t *request_take_ready(const request_t *q, bool sparing);

/* The device is out of memory: counted, traced and put in words. */
esper_status request_fail(const request_t *q);
/* It was rejected before the device was asked: counted. */
esper_status request_reject(const request_t *q);

#endif
