/* fence.h: pages and addresses of its own for an allocation, so that what touches it after its end,
 * or the addresses behind it, faults.
 *
 * A fenced segment has one block that is ever handed out. It lies at the end of the segment's
 * pages, and no page follows. Once it is free and owes nothing, the pages are unmapped. Their
 * addresses serve again only when all others have served: each device reserves addresses for fences
 * alone, up to a limit, and hands them out in order, round and round. */
#ifndef ESPER_FENCE_H
#define ESPER_FENCE_H

#include "../blocks/block.h"

/* As segment_obtain, with a fence. ESPER_UNSUPPORTED: the device maps no pages. *missing becomes 0,
 * or with ESPER_OUT_OF_MEMORY the bytes for which there are no addresses, if that is the reason. */
esper_status fence_obtain(heap_t *heap, size_t size, bool large, block_t **block, size_t *missing);

/* Unmaps the pages of a claimed block that owes nothing. Under the growth lock. */
void fence_release(device_t *device, block_t *block);

/* The same when the core is destroyed, and afterwards the device's addresses. */
void fence_lower(segment_t *segment);
void fences_destroy(device_t *device);

/* How often the addresses have come round. Under the lock. */
uint64_t fence_rounds(const device_t *device);

bool fences_are_valid(const device_t *device);

#endif
