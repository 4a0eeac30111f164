#include "asleep.h"

#include <stdlib.h>

#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/use.h"
#include "../pools/pool.h"
#include "../stats/stats.h"
#include "failure.h"
#include "mapped.h"

/* ---- the list of what sleeps --------------------------------------------- */

static bool enlarge(void **array, size_t *capacity, size_t needed, size_t element)
{
  if (needed <= *capacity)
    return true;
  void *larger = realloc(*array, needed * element);
  if (!larger)
    return false;
  *array = larger;
  *capacity = needed;
  return true;
}

bool sleeping_reserve(sleeping_t *s, size_t pages, size_t parcels)
{
  void *page_array = s->pages, *parcel_array = s->parcels;
  bool done = enlarge(&page_array, &s->page_capacity, s->page_count + pages, sizeof *s->pages);
  s->pages = page_array;
  done = done &&
         enlarge(&parcel_array, &s->parcel_capacity, s->parcel_count + parcels, sizeof *s->parcels);
  s->parcels = parcel_array;
  return done;
}

void sleeping_clear(sleeping_t *s)
{
  s->page_count = s->parcel_count = s->kept = 0;
}

/* ---- the books ----------------------------------------------------------- */

static void set_asleep(segment_t *s, size_t bytes)
{
  __atomic_store_n(&s->asleep, bytes, __ATOMIC_RELAXED);
}

void asleep_set(segment_t *s, page_t page, bool asleep)
{
  size_t size = page_size(s, &page);
  page.asleep = asleep;
  set_asleep(s, asleep ? s->asleep + size : s->asleep - size);
  page_store(s, page);
}

/* Changes the figures of memory that is not on the device, in bytes. */
static void count_absent(segment_t *s, size_t gone, size_t came)
{
  esper_counters *counters = &s->device->counters;
  s->absent += gone - came;
  counters->bytes_asleep += gone - came;
  if (counters->bytes_asleep_peak < counters->bytes_asleep)
    counters->bytes_asleep_peak = counters->bytes_asleep;
}

static void absent_set(segment_t *s, page_t page, bool absent)
{
  size_t size = page_size(s, &page);
  esper_stats *stats = &s->device->stats;
  page.absent = absent;
  count_absent(s, absent ? size : 0, absent ? 0 : size);
  page_store(s, page);
  if (absent)
    stats_pages_slept(stats, s->heap->pool->reserved_bytes, s->large, size);
  else
    stats_pages_woke(stats, s->heap->pool->reserved_bytes, s->large, size);
}

void sleeping_page_set(const sleeping_page_t *page, uint64_t handle, bool absent)
{
  device_t *device = page->segment->device;
  lock(&device->lock);
  page_t entry = *sleeping_page_entry(page);
  entry.handle = handle;
  absent_set(page->segment, entry, absent);
  if (absent)
    device->refused = 0;
  unlock(&device->lock);
}

void sleeping_page_wakes(const sleeping_page_t *page)
{
  page_t entry = *sleeping_page_entry(page);
  entry.empty = false;
  asleep_set(page->segment, entry, false);
}

/* Finds the first absent pages that adjoin in [begin, end). Returns their bytes. */
static size_t find_absent(const segment_t *s, uintptr_t begin, uintptr_t end, uintptr_t *first)
{
  size_t size = 0;
  for (uintptr_t at = begin; at < end;) {
    const page_t *page = page_at(s, at);
    if (!page->absent && size)
      break;
    if (page->absent && !size)
      *first = page_address(s, page);
    size += page->absent ? page_size(s, page) : 0;
    at = page_address(s, page) + page_size(s, page);
  }
  return size;
}

static void drop_absent(block_t *block)
{
  segment_t *s = block->segment;
  size_t size = block->size;
  stretch_peaks_t peaks = stats_stretches_begin(&s->device->stats);
  set_asleep(s, s->asleep - size);
  count_absent(s, 0, size);
  mapped_left(block, false); /* the block may be a part of another hole now */
  stats_pages_woke(&s->device->stats, s->heap->pool->reserved_bytes, s->large, size);
  stats_stretches_end(&s->device->stats, peaks);
}

/* A claimed free block wakes. Its pages that are absent become holes; the rest is free again. */
static void free_wakes(block_t *block)
{
  uintptr_t first = 0;
  size_t size;
  cache_close(block->segment->heap);
  block_set_state(block, BLOCK_CLAIMED);
  while (block && (size = find_absent(block->segment, block->address, block->address + block->size,
                                      &first))) {
    block_t *front = first > block->address ? block : NULL;
    block_count_inactive(block);
    uses_drop(block->segment->device, block);
    if (front)
      block = mapped_split(front, first - front->address);
    block_t *rest = block->size > size ? mapped_split(block, size) : NULL;
    drop_absent(block);
    if (front)
      free_blocks_add(front);
    block = rest;
  }
  if (block)
    free_blocks_add(block);
}

void asleep_free_blocks_wake(segment_t *s, bool all)
{
  for (block_t *b = s->first, *after; b; b = after) {
    /* A free block or a hole beside it may become one with it. */
    after = b->next;
    if (after && (after->state == BLOCK_READY || after->state == BLOCK_HOLE))
      after = after->next;
    if (b->state == BLOCK_ASLEEP && (all || !pages_sleep_under(b)))
      free_wakes(b);
  }
}

/* ---- the calls of a sleep ------------------------------------------------ */

void asleep_refuse(device_t *device, const bool tags[TAGS], bool before[TAGS])
{
  lock(&device->lock);
  caches_close(device);
  for (int i = 0; i < TAGS; i++) {
    before[i] = device->asleep[i];
    if (tags[i] && !before[i]) {
      device->asleep[i] = true;
      atomic_fetch_add(&device->core->asleep, 1);
    }
  }
  unlock(&device->lock);
}

void asleep_allow(device_t *device, const bool tags[TAGS], const bool before[TAGS])
{
  lock(&device->lock);
  for (int i = 0; i < TAGS; i++)
    if (tags[i] && !before[i]) {
      device->asleep[i] = false;
      atomic_fetch_sub(&device->core->asleep, 1);
    }
  unlock(&device->lock);
}

size_t asleep_unmap(device_t *device, const sleeping_page_t *pages, size_t count)
{
  size_t bytes = 0;
  lock(&device->growth_lock); /* not while copies are waited for: others may grow */
  for (size_t i = 0; i < count && !device_has_failed(device); i++) {
    mapped_give_back(pages[i].segment, sleeping_page_entry(&pages[i]));
    bytes += sleeping_page_size(&pages[i]);
    sleeping_page_set(&pages[i], 0, true);
  }
  unlock(&device->growth_lock);
  return bytes;
}

void asleep_stay_awake(device_t *device, sleeping_t *sleeping)
{
  lock(&device->growth_lock); /* not while another thread hands pages to a process */
  lock(&device->lock);
  caches_close(device);
  for (size_t i = 0; i < sleeping->page_count; i++)
    sleeping_page_wakes(&sleeping->pages[i]);
  for (segment_t *s = device->first_segment; s; s = s->next)
    if (s->pages && s->heap->tag == sleeping->tag)
      asleep_free_blocks_wake(s, false);
  unlock(&device->lock);
  unlock(&device->growth_lock);
  sleeping_clear(sleeping);
}
