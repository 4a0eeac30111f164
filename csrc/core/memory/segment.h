/* segment.h: classic segments, from the driver and back to it; the limits on reserved memory;
 * pins. */
#ifndef ESPER_SEGMENT_H
#define ESPER_SEGMENT_H

#include "../blocks/block.h"

/* Whether the device may have `size` more bytes. ESPER_OUT_OF_MEMORY: the memory fraction does not
 * allow them. ESPER_REJECTED: they would pass the rejection share. Under the lock. */
esper_status segment_check_limits(const device_t *device, size_t size);

/* Whether the memory fraction and the rejection share allow `size` more bytes. */
bool segment_may_come(const device_t *device, size_t size);

/* Gets a segment from the pool's source for `heap` and stores its one block, claimed by the caller.
 * ESPER_OUT_OF_MEMORY: the driver has no more, or the memory fraction allows no more.
 * ESPER_REJECTED: see above. Under the growth lock, unless the pool has an allocator of its own:
 * that may wait for something that the caller holds. */
esper_status segment_obtain(heap_t *heap, size_t size, bool large, block_t **block);

/* Gives a classic segment back to the pool's source. Its one block is claimed, and all that it owes
 * has completed. Under the growth lock, unless the pool has an allocator of its own. */
void segment_release(device_t *device, block_t *block);

/* For fence.c, under the lock. Makes a segment without memory and its one block; nothing can fail
 * once the driver has given memory. NULL: no host memory. */
block_t *segment_make(heap_t *heap, size_t size, bool large);
/* Discards a segment without memory and its blocks, of which this is the first. */
void segment_discard(device_t *device, block_t *block);
/* Adds memory to the map, lists and statistics, and takes it out again: the segment and its block,
 * or the only one of its blocks that is ever handed out. */
void segment_add(block_t *block, uintptr_t address);
void segment_leaves(device_t *device, block_t *block);

/* Changes the home of a segment, none of whose blocks is in a block cache. Under the lock. */
void segment_move(segment_t *segment, heap_t *heap);

/* See esper_pin() and esper_unpin(). */
esper_status segment_pin(core_t *core, const void *ptr, void **address);
esper_status segment_unpin(core_t *core, void *address);
/* Add to and remove from the device's list. Under the lock. */
void segment_link(segment_t *segment);
void segment_unlink(segment_t *segment);

#endif
