/* mapped.h: mapped segments: reserved addresses, with pages where the heap needs
 * memory.
 *
 * Blocks and holes tile the addresses from the first to the last; the hole at the
 * end is what was never used. So a heap mostly has one such segment a size class:
 * it grows into a hole, and free memory at the hole's edges is a part of what it
 * gets, wherever it is. Under the device's lock, but for what says otherwise. Whoever
 * changes what is beside a block closes the heap's front (front.h). */
#ifndef ESPER_MAPPED_H
#define ESPER_MAPPED_H

#include "../blocks/block.h"

static inline size_t round_to_granule(const device_t *device, size_t size)
{
  return (size + device->granule - 1) / device->granule * device->granule;
}

/* Asks the driver, once it has answered never again, for the device's granule: 0, it can
 * map no pages, or would not say. Without the lock. */
size_t mapped_granule(device_t *device);

/* Reserves addresses for a mapped segment with room for `size` bytes, all of it one
 * hole. Without the lock. */
esper_status mapped_reserve(heap_t *heap, bool large, size_t size);

/* Gives an empty one back to the driver, if there is one in `pool` (NULL: in any).
 * Without the lock. False: none, or it would not go. */
bool mapped_discard_empty(device_t *device, const pool_t *pool);

/* Cuts [begin, end), which begins or ends with the hole, out of it, to be filled by
 * the caller. NULL: no host memory. */
block_t *hole_cut(block_t *hole, uintptr_t begin, uintptr_t end);
/* The first `size` bytes of a piece that is being filled stay with it. The caller
 * left a block in the arena. */
void hole_cut_back(block_t *piece, size_t size);
/* A piece that is being filled becomes a hole again. */
void hole_close(block_t *piece);

/* Pages were mapped into all of the piece: it becomes a claimed block. */
void mapped_arrived(block_t *piece);
/* The pages of the first `size` bytes of a claimed block are elsewhere, or were given
 * back. These bytes become a hole, or, if the pages are still mapped here, stale until
 * what the block owes has completed; the others are free again. The caller left a
 * block in the arena. */
void mapped_left(block_t *block, size_t size, bool stale);

/* Unmaps the stale blocks that owe nothing any more. False: one could not be, or there
 * is no host memory. Without the lock. */
bool mapped_reap(device_t *device);
/* Whether there are any. */
bool mapped_has_reapable(const device_t *device);

/* Cuts [begin, begin + size) out of a free block, claimed; what is left of it is
 * free, and owes what it owed. NULL: no host memory, nothing changed. */
block_t *mapped_carve(block_t *block, uintptr_t begin, size_t size);

/* Unmaps the pages of a claimed block, which owes nothing to anybody, and gives them
 * back to the driver; the block becomes a hole, or a free block again from where the
 * driver would not. Without the lock. The bytes that went. */
size_t mapped_unmap(device_t *device, block_t *block);

/* Gives one page back, or says false: then it stays where it is, and serves on, perhaps
 * without its handle. Without the lock; nobody else knows of it. */
bool mapped_give_back(const segment_t *s, page_t *page);

/* Gives back whatever it has, when the core ends. */
void mapped_destroy(segment_t *segment);

bool mapped_is_valid(const segment_t *segment);

bool segment_is_valid(const segment_t *segment);

#endif
