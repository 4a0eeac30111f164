/* stitch.h: lending pages. Where no free block is large enough, free pages that lie
 * scattered over mapped segments are mapped where the heap grows, so that the device
 * need not give more.
 *
 * Pages of another heap are lent when everything that their block owes has completed,
 * for everybody; they are unmapped there at once. Pages of the heap itself may still
 * owe the heap's own order: what its stream enqueued before comes before whatever it
 * enqueues on the pages' new address. The mapping at the old address, which nobody is
 * given any more, goes when that has completed; until then it is stale. So whether a
 * heap can lend to itself does not depend on how far the GPU has come.
 *
 * Only within the default pool: graphs touch the pages of other pools, and addresses
 * there repeat from run to run, which holes would change. */
#ifndef ESPER_STITCH_H
#define ESPER_STITCH_H

#include "../blocks/block.h"

/* Blocks of whole pages, claimed, linked by `newer`. */
typedef struct lenders {
  block_t *first, **end;
  size_t bytes;
  size_t left; /* bytes of pages that are elsewhere by now, or gone */
} lenders_t;

typedef struct stitch {
  lenders_t completed; /* are unmapped before they serve */
  lenders_t ordered;   /* ... and these some time after that */
  size_t pages;        /* that moved */
  uint64_t stamp;      /* what these owe: their latest one */
  orphan_t *orphan;    /* room for a page that the driver keeps nowhere */
} stitch_t;

static inline size_t stitch_bytes(const stitch_t *stitch)
{
  return stitch->completed.bytes + stitch->ordered.bytes;
}

/* Finds out what has completed of what might be lent to the heap. Without the lock. */
void stitch_learn(heap_t *heap);

/* Claims blocks for the heap, whose stitch it is, until they are `enough` bytes, at most `most` bytes.
 * Under the lock. */
void stitch_claim(stitch_t *stitch, heap_t *heap, size_t enough, size_t most);

/* Maps their pages to where `into`, a hole that is being filled, begins. *moved are
 * the bytes that came, also if a call was refused. Without the lock. */
esper_status stitch_move(stitch_t *stitch, block_t *into, size_t *moved);

/* The books: what was not lent is free again. The caller left a block in the arena.
 * Under the lock. */
void stitch_finish(stitch_t *stitch);

#endif
