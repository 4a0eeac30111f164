/* front.h: the blocks of a heap that malloc and free reach without the device's
 * lock.
 *
 * A front stands before a heap and keeps whole, and in no bin, what the heap's
 * stream freed last: the same size is often asked for next. Its blocks owe nothing
 * but owner order. Everybody else counts them as free, and closes the front first,
 * which puts them where the others are.
 *
 * Who is at work there holds its gate (front_gate.h). While that is not closed, the
 * ready bins of its heap, and the order of the blocks in the heap's segments, do not
 * change: so a malloc can tell that a block is what the best fit would be handed out
 * from anyway. docs/design.md, "The front", says what that costs. */
#ifndef ESPER_FRONT_H
#define ESPER_FRONT_H

#include "cache_latch.h"
#include "heap.h"

/* ---- without a lock ------------------------------------------------------ */

/* What a malloc that the front did not serve found out on its way. */
typedef struct front_try {
  stream_t *stream; /* known to live for ever; or NULL */
  size_t size;      /* rounded; 0: it did not get so far */
  bool asked;       /* whether the stream is captured: it is not */
  bool missed;      /* the front has no block of the size */
} front_try_t;

/* Serves a malloc on the stream, if its front can, and nobody has to be asked
 * anything but whether the stream is captured. */
bool front_malloc(core_t *core, esper_stream stream, size_t size, front_try_t *try, void **ptr);

/* Takes the live block that starts at `ptr`. False: it is not for the front. */
bool front_free(block_t *block, uintptr_t address);

/* ---- under the device's lock ---------------------------------------------- */

void front_init(front_t *front); /* closed */

/* The same as front_malloc for a request that came the slow way; `missed`: it looked
 * there a moment ago. NULL: the front has no such block, and is closed. */
block_t *front_take_or_close(heap_t *heap, size_t size, size_t asked, bool missed);
/* A claimed block that owes no use becomes the front's. False: the front cannot be
 * open now. */
bool front_keep(block_t *block);

/* A claimed block that is not for the front goes to the bins: what the front has stays
 * there. */
void front_pass(block_t *block);

/* The block that starts at `address` becomes claimed, if it is live; counted. */
bool front_claim_live(block_t *block, uintptr_t address);

/* Nothing happens behind the back of whoever holds the lock. */
static inline bool front_is_shut(const heap_t *heap)
{
  return heap->front.empty || heap->front.held;
}

/* From here on the heap is as if it had no front, until it is opened. */
void front_clear(heap_t *heap); /* it is not shut */
static inline void front_close(heap_t *heap)
{
  if (!front_is_shut(heap))
    front_clear(heap);
}
void fronts_close_pool(const device_t *device, const pool_t *pool);
void fronts_close(const device_t *device);
/* Does nothing where the front must stay closed: in captures, and in private pools, whose
 * addresses would depend on what it has. While actions are traced, or the
 * garbage_collection_threshold goes by them, its gate stays closed, and it serves those
 * who hold the lock. */
void front_open(heap_t *heap);

/* Mallocs that wait until paused fronts resume get their blocks now, where the fronts have
 * them: more than the room of their ledgers. */
void fronts_grant_wishes(device_t *device);

/* Questions to the driver whether streams are captured. Takes the device's lock. */
uint64_t fronts_questions(device_t *device);

bool front_is_valid(heap_t *heap);

#endif
