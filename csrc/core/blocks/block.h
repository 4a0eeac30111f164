/* block.h: blocks, and how they split and merge. Under the device's lock. */
#ifndef ESPER_BLOCK_H
#define ESPER_BLOCK_H

#include "../base/types.h"

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

/* Of a block that was found without a lock. NULL: it has gone since. */
static inline segment_t *block_segment_if_any(const block_t *block)
{
  return __atomic_load_n(&block->segment, __ATOMIC_RELAXED);
}

/* Whether memory is behind it, for all to know. */
static inline bool block_is_mapped(const block_t *block)
{
  return block_state_of(block) < BLOCK_HOLE;
}

/* Whether `stream` is the one it was last handed out on. */
static inline bool block_is_of(const block_t *block, const stream_t *stream)
{
  return block->user == stream->index + 1;
}

static inline void block_set_user(block_t *block, const stream_t *stream)
{
  block->user = stream->index + 1;
}

/* That stream; NULL: it was never handed out. */
stream_t *block_user(const block_t *block);

static inline bool block_is_part(const block_t *block)
{
  return block->prev || block->next;
}

/* Whether the statistics have it as an inactive part: of one in a bin. As in PyTorch:
 * what is free in a mapped segment can go, whatever is beside it. */
static inline bool block_counts_as_split(const block_t *block)
{
  return !block->segment->pages && !block->counted_active && block_is_part(block);
}

/* Somebody will soon ask whether the blocks beside it are free: among many blocks that
 * is memory which no cache has. */
static inline void block_expect_neighbours(const block_t *block)
{
  __builtin_prefetch(block->prev);
  __builtin_prefetch(block->next);
}

bool block_is_valid(const block_t *block);

#endif
