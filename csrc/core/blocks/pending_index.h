/* pending_index.h: the earliest events that the pending blocks of a heap wait for, which mostly
 * saves looking at each block. Under the device's lock.
 *
 * The index picks one unsatisfied use of each pending block. Until that use is satisfied the block
 * is not ready. If the picked use of an active block is not a marked one, the index also takes the
 * block's marked uses: the block stays active until they are satisfied. For each stream the index
 * keeps a number that none of these uses is below. When something has completed, comparing a few
 * numbers tells whether any block may be ready. */
#ifndef ESPER_PENDING_INDEX_H
#define ESPER_PENDING_INDEX_H

#include "heap.h"

/* Notes a block that has become pending, or is looked at again. */
void pending_index_add(heap_t *heap, block_t *block);

/* Whether some pending block may have become ready. */
bool pending_index_may_be_ready(const heap_t *heap);
/* Forgets all events: the caller notes all pending blocks again. */
void pending_index_clear(heap_t *heap);

/* Whether the index would notice that what a pending block waits for is over. */
bool pending_index_is_valid(const block_t *block);

#endif
