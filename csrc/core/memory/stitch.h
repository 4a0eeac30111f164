/* stitch.h: page moves. Where no free block is large enough, free pages scattered over mapped
 * segments are mapped where the heap grows, so that the device need not provide new ones.
 *
 * Pages of another heap move once everything that their block owes has completed; they are
 * unmapped there at once. Pages of the heap itself may still owe owner order, because what its
 * stream enqueued before comes before what it enqueues on the new addresses. Their old mapping is
 * then stale: no request is given those addresses, and it goes when that work has completed. So
 * whether pages can move within a heap does not depend on how far the GPU has come.
 *
 * Pages move only in the default pool and outside captures: graphs touch those of other pools, and
 * holes would change the addresses there, which must repeat. claim_pages in grow.c says when new
 * pages come instead. */
#ifndef ESPER_STITCH_H
#define ESPER_STITCH_H

#include "../blocks/block.h"

/* Claimed blocks of whole pages, linked by `newer`. */
typedef struct movable {
  block_t *first, **end;
  size_t bytes;
} movable_t;

typedef struct stitch {
  movable_t completed; /* unmapped before the pages serve elsewhere */
  movable_t ordered;   /* unmapped some time afterwards */
  uint64_t stamp;      /* the latest stamp in `ordered` */
} stitch_t;

static inline size_t stitch_bytes(const stitch_t *stitch)
{
  return stitch->completed.bytes + stitch->ordered.bytes;
}

/* Finds out what has completed among the blocks whose pages could move. Without the lock. */
void stitch_learn(heap_t *heap);

/* Claims pages that move to the heap, until they are `enough` bytes, but never more than `most`.
 * Under the lock. */
void stitch_claim(stitch_t *stitch, heap_t *heap, size_t enough, size_t most);

/* Maps the claimed pages to the beginning of `into`, a hole that is being filled, and then ends the
 * old mappings that may go at once. *moved: the number of pages. After a failure they are where
 * they were. Under the growth lock. */
esper_status stitch_move(const stitch_t *stitch, block_t *into, size_t *moved);

/* Updates lists and statistics. If the pages have not moved, they are free again. Under the
 * lock. */
void stitch_finish(const stitch_t *stitch, bool moved);

#endif
