#include "sleeper.h"

#include <stdlib.h>

#include "../memory/asleep.h"
#include "../memory/failure.h"
#include "../order/host_wait.h"
#include "../order/record.h"
#include "../requests/drain.h"

/* The tag's empty sleeper with the most pinned memory, or else a new one. */
sleeper_t *sleeper_of(device_t *device, tag_t tag)
{
  sleeper_t *s = NULL;
  for (sleeper_t *one = device->sleepers; one; one = one->next)
    if (one->tag == tag && !one->page_count && (!s || one->pinned.bytes > s->pinned.bytes))
      s = one;
  if (s || !(s = calloc(1, sizeof *s)))
    return s;
  s->tag = tag;
  lock(&device->lock);
  s->next = device->sleepers;
  device->sleepers = s;
  unlock(&device->lock);
  return s;
}

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

bool sleeper_reserve(sleeper_t *s, size_t pages, size_t parcels)
{
  void *page_array = s->pages, *parcel_array = s->parcels;
  bool done = enlarge(&page_array, &s->page_capacity, s->page_count + pages, sizeof *s->pages);
  s->pages = page_array;
  done = done &&
         enlarge(&parcel_array, &s->parcel_capacity, s->parcel_count + parcels, sizeof *s->parcels);
  s->parcels = parcel_array;
  return done;
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

void sleeper_clear(sleeper_t *s)
{
  s->page_count = s->parcel_count = s->kept = 0;
}

void sleepers_trim(device_t *device, bool always)
{
  for (sleeper_t **link = &device->sleepers, *s; (s = *link);) {
    /* Pinned memory may go although pages sleep, if nothing of them is kept. */
    if (always || !s->kept)
      pinned_memory_free(&s->pinned, device);
    if (!always && s->page_count + s->pinned.bytes) {
      link = &s->next;
      continue;
    }
    lock(&device->lock);
    *link = s->next;
    unlock(&device->lock);
    free(s->pages);
    free(s->parcels);
    free(s);
  }
}

void sleeper_copy(device_t *device, const sleeper_t *s, const parcel_t *parcel,
                  sleeper_copy_t *copy)
{
  for (size_t at = 0, most; at < parcel->size; at += most) {
    char *host = pinned_memory_at(&s->pinned, parcel->offset + at, &most);
    if (most > parcel->size - at)
      most = parcel->size - at;
    failure_note(device, copy(device, parcel->address + at, host, most));
  }
}

void sleeper_wait_for_copies(device_t *device, record_t *record, bool wait)
{
  if (!record)
    failure_note(device, drain_at_any_cost(device));
  else if (wait)
    failure_note(device, record_wait(record));
  if (record)
    record_drop(record);
}

esper_status sleeper_stream(device_t *device, presented_t *copier)
{
  esper_status status = device->copier ? ESPER_OK : stream_create_own(device, &device->copier);
  if (status == ESPER_OK)
    *copier = stream_presented(device->copier, device->copier->handle);
  return status;
}
