/* block.h: blocks, and how they split and merge. Under the device's lock. */
#ifndef ESPER_BLOCK_H
#define ESPER_BLOCK_H

#include "types.h"

/* A new block that is not in the map. NULL: no host memory. */
block_t *block_make(device_t *device, segment_t *segment, uintptr_t address, size_t size);
/* The same, in the map. */
block_t *block_create(device_t *device, segment_t *segment, uintptr_t address, size_t size);
void block_destroy(device_t *device, block_t *block);
/* The same for a block that has left the map already. */
void block_discard(device_t *device, block_t *block);

/* Cuts `block` down to `size` bytes and returns the rest, which owes whatever
 * the block owes: the caller is taking the front, which owes it no more.
 * NULL: no host memory, nothing changed. */
block_t *block_split(device_t *device, block_t *block, size_t size);

/* `block` takes in its next neighbour; both free and in no bin. */
void block_merge_next(device_t *device, block_t *block);

/* Whether memory is behind it, for all to know. */
static inline bool block_is_mapped(const block_t *block)
{
  return block_state_of(block) < BLOCK_HOLE;
}

static inline bool block_is_part(const block_t *block)
{
  return block->prev || block->next;
}

bool block_is_valid(const block_t *block);

#endif
