/* asleep.h: pages that sleep. Such a page keeps its entry in the table, its blocks and its
 * addresses. Its memory is absent once it went back to the driver. Live blocks on it stay live and
 * may be freed. Free ones, and those that are freed, are BLOCK_ASLEEP until the page wakes, and in
 * no bin.
 *
 * With choose.h and waking.h these are the calls by which ../../sleep puts pages to sleep and wakes
 * them. They are called without the device's lock, unless they say otherwise. */
#ifndef ESPER_ASLEEP_H
#define ESPER_ASLEEP_H

#include <stdatomic.h>

#include "page_table.h"

/* Bytes of one page that are kept. */
typedef struct parcel {
  uintptr_t address;
  size_t size;
  size_t offset; /* where the host keeps them */
} parcel_t;

typedef struct sleeping_page {
  segment_t *segment;
  size_t first;   /* its first granule in the segment */
  size_t parcels; /* how many of the parcels are its own; they are in the order of the pages */
  bool unneeded;  /* one freed block fills it, and it need not wake */
} sleeping_page_t;

/* What one call has put to sleep of one tag; under the sleep lock. A device's list of these changes
 * under the device's lock, too, so that statistics need not wait for a sleep to end. */
typedef struct sleeping {
  tag_t tag;
  sleeping_page_t *pages;
  size_t page_count, page_capacity;
  parcel_t *parcels;
  size_t parcel_count, parcel_capacity;
  size_t kept;        /* bytes of all parcels */
  atomic_size_t host; /* bytes of host memory for them; statistics read it meanwhile */
  struct sleeping *next;
} sleeping_t;

static inline page_t *sleeping_page_entry(const sleeping_page_t *page)
{
  return &page->segment->pages[page->first];
}

static inline size_t sleeping_page_size(const sleeping_page_t *page)
{
  return page_size(page->segment, sleeping_page_entry(page));
}

/* Makes the arrays large enough for this many more pages and parcels. False: no host memory. */
bool sleeping_reserve(sleeping_t *sleeping, size_t pages, size_t parcels);
/* All its pages are awake. */
void sleeping_clear(sleeping_t *sleeping);

/* From now on no memory is handed out under the tags. *before becomes what slept already. */
void asleep_refuse(device_t *device, const bool tags[TAGS], bool before[TAGS]);
/* Memory is handed out again under the tags that did not sleep before. */
void asleep_allow(device_t *device, const bool tags[TAGS], const bool before[TAGS]);

/* The memory of pages that sleep goes back to the driver. Returns the bytes; ends early on a device
 * that fails. */
size_t asleep_unmap(device_t *device, const sleeping_page_t *pages, size_t count);

/* The pages are awake again, because the sleep ended before any of them was unmapped. */
void asleep_stay_awake(device_t *device, sleeping_t *sleeping);

/* ---- for choose.c and waking.c ------------------------------------------- */

/* The memory of a page that sleeps went back to the driver, or was mapped again with a new handle.
 * It still sleeps. Takes the lock, because frees read the entries of pages that sleep. */
void sleeping_page_set(const sleeping_page_t *page, uint64_t handle, bool absent);

/* These three are called under the lock. */

/* A page goes to sleep or wakes: updates its entry, which becomes `page`. */
void asleep_set(segment_t *s, page_t page, bool asleep);
void sleeping_page_wakes(const sleeping_page_t *page);

/* The free blocks of a segment wake: all of them, or those that lie on no page that sleeps. Of
 * these, pages that are absent become holes, for each of which the caller has reserved two blocks
 * in the arena. */
void asleep_free_blocks_wake(segment_t *s, bool all);

#endif
