/* segment.h: segments of the driver's memory. */
#ifndef ESPER_SEGMENT_H
#define ESPER_SEGMENT_H

#include "../blocks/block.h"

/* Bytes that are to be obtained count in device->reserving, or two threads would pass
 * the limit, until the caller takes them out. ESPER_OUT_OF_MEMORY: the memory fraction
 * does not allow them; ESPER_REJECTED. Under the lock. */
esper_status segment_reserve(device_t *device, size_t size);

/* Whether the memory fraction and the rejection share let so much more be reserved. */
bool segment_may_come(const device_t *device, size_t size);

/* Gets a segment from the driver for `heap` and stores its one block, claimed
 * by the caller. Called without the device's lock. ESPER_OUT_OF_MEMORY: the
 * driver has no more, or the memory fraction allows no more; ESPER_REJECTED. */
esper_status segment_obtain(heap_t *heap, size_t size, bool large, block_t **block);

/* Gives a classic segment, claimed through its one block, back to the driver. Called
 * without the lock; all that it owes has completed. False: the driver would
 * not take it, and it is a free block again. */
bool segment_release(device_t *device, block_t *block);

/* The segment changes its home; no front has a block of it. Under the lock. */
void segment_move(segment_t *segment, heap_t *heap);

/* Of what esper_pin() and esper_unpin() say. */
esper_status segment_pin(core_t *core, const void *ptr, void **address);
esper_status segment_unpin(core_t *core, void *address);
/* Into the device's list, and out of it. Under the lock. */
void segment_link(segment_t *segment);
void segment_unlink(segment_t *segment);

#endif
