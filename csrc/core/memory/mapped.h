/* mapped.h: mapped segments, which are reserved addresses with pages where the heap needs memory.
 *
 * Blocks and holes tile the addresses of a segment; the hole at the end was never used. A heap
 * usually has one such segment for each size class. It grows into a hole, and free memory at the
 * hole's ends becomes part of the new block.
 *
 * Under the device's lock unless a comment says otherwise. A function that changes what is beside
 * a block closes the heap's block cache first. */
#ifndef ESPER_MAPPED_H
#define ESPER_MAPPED_H

#include "../blocks/block.h"

static inline size_t round_to_granule(const device_t *device, size_t size)
{
  return (size + device->granule - 1) / device->granule * device->granule;
}

/* The device's granule, which the driver is asked for once. 0: it cannot map pages, or its answer
 * was an error, and it will be asked again. Without the lock. */
size_t mapped_granule(device_t *device);

/* Reserves addresses for a mapped segment of at least `size` bytes, all of it one hole. Without the
 * lock. */
esper_status mapped_reserve(heap_t *heap, bool large, size_t size);

/* Gives the addresses of an empty segment back to the driver, if `pool` (NULL: any pool) has one.
 * False: there is none. Under the growth lock. */
bool mapped_discard_empty(device_t *device, const pool_t *pool);

/* Cuts [begin, end) out of a hole, at its beginning or end, for the caller to fill. NULL: no host
 * memory. */
block_t *hole_cut(block_t *hole, uintptr_t begin, uintptr_t end);
/* Makes a piece that is being filled a hole again. */
void hole_close(block_t *piece);

/* Makes a piece that is wholly filled with pages a claimed block. */
void mapped_arrived(block_t *piece);
/* Accounts for the pages under a claimed block, which moved away or went back to the driver. It
 * becomes a hole or, if the pages are still mapped here, stale until what it owes has completed. */
void mapped_left(block_t *block, bool stale);

/* Unmaps the stale blocks that owe nothing any more. Under the growth lock. */
void mapped_reap(device_t *device);

/* Cuts [begin, begin + size) out of a free block and returns it claimed. What is left is free and
 * keeps what the block owed. NULL: no host memory, nothing changed. */
block_t *mapped_carve(block_t *block, uintptr_t begin, size_t size);

/* As block_split, and the rest is withheld like the block. */
block_t *mapped_split(block_t *block, size_t size);

/* Unmaps the pages of a claimed block that owes nothing and gives them back to the driver. The
 * block becomes a hole. Under the growth lock. */
void mapped_unmap(device_t *device, block_t *block);

/* Gives one page back to the driver. Under the growth lock; no other thread may know the page. */
void mapped_give_back(const segment_t *s, const page_t *page);

/* Gives all its memory back when the core is destroyed. */
void mapped_destroy(segment_t *segment);

bool mapped_is_valid(const segment_t *segment);

bool segment_is_valid(const segment_t *segment);

#endif
