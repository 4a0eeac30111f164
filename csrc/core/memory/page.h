/* page.h: which pages are where in a mapped segment.
 *
 * The table has an entry for each granule of the segment's addresses; what was
 * never mapped costs no host memory. Entries of blocks that one thread claimed, and
 * of holes that it is filling, are that thread's; all others are under the device's
 * lock. */
#ifndef ESPER_PAGE_H
#define ESPER_PAGE_H

#include "../blocks/block.h"

/* Every granule of a page has the same entry. */
struct page {
  uint64_t handle;   /* the driver's */
  uint32_t first;    /* granule of the segment */
  uint32_t granules; /* 0: no page is here */
  bool released;     /* its handle went back: the page goes when it is unmapped */
  bool stale;        /* it has moved: this is where it was */
  shared_t *shared;  /* other processes may have it: it stays; or NULL */
};

/* The table of a segment. False: no host memory. */
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

/* The page around the address; NULL: none. */
page_t *page_at(const segment_t *s, uintptr_t address);

void page_add(segment_t *s, uintptr_t address, size_t size, uint64_t handle);
void page_remove(segment_t *s, page_t *page);

/* Pages that lie in the block as a whole and one after the other and are not shared: from
 * *first on, until they are `enough` bytes; at most `most` bytes; to be `lent`, only such
 * as have their handle. Their bytes; 0: none. */
size_t pages_within(const block_t *block, size_t enough, size_t most, bool lent, uintptr_t *first);

/* Host memory of the table, as far as it was touched. */
size_t pages_metadata(const segment_t *s);

/* Blocks have pages, holes have none, and their bytes are the segment's. */
bool pages_are_valid(const segment_t *s);

#endif
