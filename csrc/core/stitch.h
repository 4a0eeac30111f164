/* stitch.h: lending pages. Where no free block is large enough, completed free pages
 * that lie scattered over mapped segments are unmapped there and mapped where the
 * heap grows, so that the device need not give more.
 *
 * A page is lent if everything that its block owes has completed, for everybody: it
 * is unmapped at once. Only within the default pool: graphs touch the pages of other
 * pools, and their addresses repeat from run to run, which holes would change. */
#ifndef ESPER_STITCH_H
#define ESPER_STITCH_H

#include "types.h"

/* Finds out what has completed of what might be lent to the heap. Without the lock. */
void stitch_learn(heap_t *heap);

/* Claims blocks of whole pages for the heap until they are `enough` bytes, at most
 * `most` bytes: a list linked by `newer`. Their bytes. Under the lock. */
size_t stitch_claim(heap_t *heap, size_t enough, size_t most, block_t **lenders);

/* Moves their pages to where `into`, a hole that is being filled, begins: *left are
 * the bytes that left the lenders, in the order of the list, *moved those that came;
 * both are right if a call was refused, too. Without the lock. */
esper_status stitch_move(const block_t *lenders, block_t *into, size_t *left, size_t *moved);

/* The first `left` bytes of the lenders become holes, what was not lent is free again.
 * The caller left a block in the arena. Under the lock. */
void stitch_finish(block_t *lenders, size_t left);

#endif
