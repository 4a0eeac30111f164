#include "sleeper.h"

#include <stdlib.h>

#include "../core/base/error.h"
#include "../core/base/tag.h"
#include "../core/memory/failure.h"
#include "../core/order/host_wait.h"
#include "../core/order/record.h"
#include "../core/requests/drain.h"

static void forget_all(device_t *device)
{
  sleepers_trim(device, true);
}

/* The tag's empty sleeper with the most pinned memory, or else a new one. */
sleeping_t *sleeper_of(device_t *device, tag_t tag)
{
  sleeping_t *found = NULL;
  for (sleeping_t *one = device->sleeping; one; one = one->next)
    if (one->tag == tag && !one->page_count && (!found || one->host > found->host))
      found = one;
  if (found)
    return found;
  sleeper_t *s = calloc(1, sizeof *s);
  if (!s)
    return NULL;
  s->list.tag = tag;
  lock(&device->lock);
  s->list.next = device->sleeping;
  device->sleeping = &s->list;
  device->forget_sleeping = forget_all;
  unlock(&device->lock);
  return &s->list;
}

esper_status sleeper_fit(sleeper_t *s, device_t *device)
{
  esper_status status = pinned_memory_fit(&s->pinned, device, s->list.kept);
  atomic_store(&s->list.host, s->pinned.bytes);
  return status;
}

void sleepers_trim(device_t *device, bool always)
{
  for (sleeping_t **link = &device->sleeping, *list; (list = *link);) {
    sleeper_t *s = sleeper_with(list);
    /* Pinned memory may go although pages sleep, if nothing of them is kept. */
    if (always || !list->kept)
      pinned_memory_free(&s->pinned, device);
    atomic_store(&list->host, s->pinned.bytes);
    if (!always && list->page_count + s->pinned.bytes) {
      link = &list->next;
      continue;
    }
    lock(&device->lock);
    *link = list->next;
    unlock(&device->lock);
    free(list->pages);
    free(list->parcels);
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

record_t *sleeper_record(presented_t copier)
{
  enum { TRIES = 8 };
  record_t *record = NULL;
  for (int i = 0; i < TRIES && !record; i++)
    record = stream_record(copier);
  return record;
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
  if (status != ESPER_OK)
    return status;
  *copier = stream_presented(device->copier, device->copier->handle);
  record_t *record = sleeper_record(*copier);
  if (record)
    record_drop(record);
  return ESPER_OK;
}

esper_status sleeper_tags(const char *const *names, size_t count, bool tags[TAGS])
{
  for (unsigned i = 0; i < TAGS; i++)
    tags[i] = !names && i < tag_count();
  for (size_t i = 0; names && i < count; i++) {
    if (!names[i])
      return error_set(ESPER_INVALID,
                       "tag %zu of %zu has no name: pass \"\" for memory without a tag", i + 1,
                       count);
    int tag = *names[i] ? tag_find(names[i]) : TAG_NONE;
    if (tag < 0)
      return error_set(ESPER_INVALID, "there is no tag '%s': no memory was ever allocated under it",
                       names[i]);
    tags[tag] = true;
  }
  return ESPER_OK;
}
