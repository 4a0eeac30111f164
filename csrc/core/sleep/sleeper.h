/* sleeper.h: what one call has put to sleep of one tag: its pages, and where the host keeps their
 * bytes. Under the device's sleep lock. */
#ifndef ESPER_SLEEPER_H
#define ESPER_SLEEPER_H

#include "../memory/page_table.h"
#include "pinned_memory.h"

/* Bytes of one page that are kept. */
typedef struct parcel {
  uintptr_t address;
  size_t size;
  size_t offset; /* in the pinned memory */
} parcel_t;

typedef struct sleeping_page {
  segment_t *segment;
  size_t first;   /* its first granule in the segment */
  size_t parcels; /* how many of the parcels are its own; they are in the order of the pages */
  bool unneeded;  /* one freed block fills it, so it need not wake */
} sleeping_page_t;

/* After its pages woke, a sleeper is empty, and keeps its pinned memory for the next sleep of its
 * tag. The list of sleepers changes under the device's lock, too, so that statistics need not wait
 * for a sleep to end. */
typedef struct sleeper {
  tag_t tag;
  sleeping_page_t *pages;
  size_t page_count, page_capacity;
  parcel_t *parcels;
  size_t parcel_count, parcel_capacity;
  size_t kept; /* bytes of all parcels */
  pinned_memory_t pinned;
  struct sleeper *next;
} sleeper_t;

/* An empty sleeper of the tag. NULL: no host memory. */
sleeper_t *sleeper_of(device_t *device, tag_t tag);

/* Makes the arrays large enough for this many more pages and parcels. False: no host memory. */
bool sleeper_reserve(sleeper_t *sleeper, size_t pages, size_t parcels);

static inline page_t *sleeping_page_entry(const sleeping_page_t *page)
{
  return &page->segment->pages[page->first];
}

/* Notes that the page was unmapped, or that it was mapped again with a new handle. It still
 * sleeps. Without the lock: takes it, because frees read the table of pages that sleep. */
void sleeping_page_set(const sleeping_page_t *page, uint64_t handle, bool absent);

/* The page is awake. Under the lock. */
void sleeping_page_wakes(const sleeping_page_t *page);

/* All its pages are awake. */
void sleeper_clear(sleeper_t *sleeper);

/* Frees the pinned memory of all sleepers that keep no bytes, and the sleepers that are empty. With
 * `always`: all sleepers and their pinned memory. */
void sleepers_trim(device_t *device, bool always);

/* Calls `copy` for each piece of a parcel: a parcel may lie in several chunks of pinned memory. */
typedef esper_status sleeper_copy_t(device_t *device, uintptr_t address, char *host, size_t size);
void sleeper_copy(device_t *device, const sleeper_t *sleeper, const parcel_t *parcel,
                  sleeper_copy_t *copy);

/* The host waits for the copies before the record, which is dropped. NULL: it waits for all of the
 * device. A device that cannot be waited for has failed. */
void sleeper_wait_for_copies(device_t *device, record_t *record, bool wait);

/* The core's own stream for copies, as presented. NULL stream: the driver refused. */
esper_status sleeper_stream(device_t *device, presented_t *copier);

#endif
