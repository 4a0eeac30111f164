/* page_table.h: the page table of a mapped segment. It has an entry for each granule of the
 * segment's addresses; entries that were never used cost no host memory.
 *
 * A thread that has claimed a block, or is filling a hole, owns the entries there. The device's
 * lock guards all others. */
#ifndef ESPER_PAGE_TABLE_H
#define ESPER_PAGE_TABLE_H

#include "../blocks/block.h"

/* All granules of a page have the same entry. */
struct page {
  uint64_t handle;   /* of the driver */
  uint32_t first;    /* its first granule in the segment */
  uint32_t granules; /* 0: there is no page */
  bool stale;        /* the page moved away from here */
  bool asleep;       /* put to sleep: nothing may touch its addresses until it wakes */
  bool absent;       /* asleep: its memory went back to the driver */
  bool empty;        /* asleep: its contents were not kept, and it wakes full of zeros */
  shared_t *shared;  /* NULL, or: other processes may have the page, so it stays */
};

/* Makes the table of a segment. False: no host memory. */
bool pages_create(segment_t *s);
void pages_destroy(segment_t *s);

static inline size_t page_granule(const segment_t *s, uintptr_t address)
{
  return (address - s->address) / s->device->granule;
}

static inline uintptr_t page_address(const segment_t *s, const page_t *page)
{
  return s->address + page->first * s->device->granule;
}

static inline size_t page_size(const segment_t *s, const page_t *page)
{
  return page->granules * s->device->granule;
}

/* The page around an address; NULL: none. */
page_t *page_at(const segment_t *s, uintptr_t address);

void page_add(segment_t *s, uintptr_t address, size_t size, uint64_t handle);
void page_remove(segment_t *s, page_t *page);
/* Gives the entries of all granules of a page a new value. */
void page_store(segment_t *s, page_t page);

/* Finds adjoining pages that lie wholly in the block and are not shared, up to `enough` bytes and
 * never over `most`. *first is where they begin; returns their bytes, 0 for none. */
size_t pages_within(const block_t *block, size_t enough, size_t most, uintptr_t *first);

/* Whether the block lies on a page that sleeps. */
bool pages_sleep_under(const block_t *block);
/* Whether all of its pages are gone, so that nothing can touch it. */
bool pages_are_absent_under(const block_t *block);

/* Checks that blocks have pages, that holes have none, and that the segment's bytes add up. */
bool pages_are_valid(const segment_t *s);

#endif
