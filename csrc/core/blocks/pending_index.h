/* pending_index.h: what the pending blocks of a heap wait for, as far as that saves looking at
 * each of them. Under the device's lock.
 *
 * Each pending block has a use for which it waits: as long as that one is not satisfied,
 * the block is not ready, and bars gates if it did before. Of each stream the heap knows a
 * number that none of these uses is below. So whoever hears that something has completed
 * or was gated on asks a few numbers first, and mostly learns that it is nothing to this
 * heap. */
#ifndef ESPER_PENDING_INDEX_H
#define ESPER_PENDING_INDEX_H

#include "heap.h"

/* A block of the heap has become pending, or is looked at again. */
void pending_index_add(heap_t *heap, block_t *block);
/* It is pending no more. */
void pending_index_remove(heap_t *heap, block_t *block);

/* Whether some pending block may have become ready, or bar gates no more. */
bool pending_index_may_be_ready(const heap_t *heap);
/* All of them will be noted again. */
void pending_index_clear(heap_t *heap);

/* Whether every pending block owes a use that bars gates, or there is none. */
static inline bool pending_are_barred(const heap_t *heap, bool large)
{
  return heap->pending_index.barred[large] == heap->pending[large].count;
}

/* The heap hears of it when what a pending block waits for is over. */
bool pending_index_is_valid(const block_t *block);

#endif
