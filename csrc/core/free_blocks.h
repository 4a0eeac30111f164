/* free_blocks.h: the free blocks of a heap. Under the device's lock.
 *
 * A free block is *ready* when its heap's stream may have it at once, else
 * *pending*. Ready neighbours merge; pending blocks stay as they are until
 * what they owe is satisfied, so that a long use of a small block does not
 * hold a large one. */
#ifndef ESPER_FREE_BLOCKS_H
#define ESPER_FREE_BLOCKS_H

#include "types.h"

/* A claimed block becomes a free one. */
void free_blocks_add(block_t *block);

/* The same for a block that owes no use: it is kept warm, whole and in no bin,
 * as the next malloc often wants just that size. */
void free_blocks_keep_warm(block_t *block);

/* The heap's warm block, if it is what the best fit for that size would be
 * handed out from anyway; it becomes claimed. */
block_t *free_blocks_take_warm(heap_t *heap, size_t size);

/* The heap's warm block goes where the others are. */
void free_blocks_settle(heap_t *heap);

/* A free block becomes claimed: it is in no bin. */
void free_blocks_claim(block_t *block);

/* Pending blocks whose obligations have been satisfied become ready. */
void free_blocks_promote(heap_t *heap);

/* The ready block that fits best; NULL: none. */
block_t *free_blocks_best_ready(const heap_t *heap, size_t size, bool large);

/* The pending block that fits best of those that a stream may be gated on. */
block_t *free_blocks_best_gateable(const heap_t *heap, const stream_t *reader,
                                   size_t size, bool large, bool at_free_too);

/* Whether some large one wastes an eighth of the request at most. */
bool free_blocks_near_gateable(const heap_t *heap, const stream_t *reader, size_t size);

/* The block's bytes stop counting as active. */
void free_blocks_satisfied(block_t *block);

#endif
