#include "stream.h"

#include <stdlib.h>

#include "../base/call.h"
#include "../base/core_assert.h"
#include "../base/error.h"
#include "event.h"
#include "record.h"
#include "retire.h"

/* ---- finding streams --------------------------------------------------- */

static bool is_special(const void *handle)
{
  return (uintptr_t)handle <= 2;
}

/* Streams that had the same handle one after another are in the same bucket. */
static _Atomic(stream_t *) *bucket_of_id(core_t *core, uint64_t id, const void *handle)
{
  uint64_t key = is_special(handle) ? id : (uintptr_t)handle;
  return &core->stream_by_id[key * 0x9e3779b97f4a7c15u >> 56];
}

/* Needs no lock: streams stay where they are until the core goes. `device` NULL: any. */
static stream_t *find_by_id(core_t *core, const device_t *device, uint64_t id, const void *handle)
{
  stream_t *s = atomic_load_explicit(bucket_of_id(core, id, handle), memory_order_acquire);
  while (s && (atomic_load_explicit(&s->id, memory_order_relaxed) != id || s->handle != handle ||
               (device && s->device != device)))
    s = s->next_in_bucket;
  return s;
}

/* Whether the id comes from id_within_capture, not from the driver. */
static bool is_made_up(uint64_t id)
{
  return id >> 62;
}

/* A mortal stream that has ended and left nothing behind: its handle has come back with another id.
 * The next stream with the handle takes over its entry. */
static stream_t *find_ended(core_t *core, const device_t *device, uint64_t id, void *handle)
{
  if (is_special(handle) || is_made_up(id))
    return NULL;
  stream_t *s = atomic_load(bucket_of_id(core, id, handle));
  while (s && (s->handle != handle || s->device != device || is_made_up(s->id) ||
               atomic_load(&s->immortal) ||
               (RULE(ENDED_OWES_NOTHING) &&
                (atomic_load(&s->kept) || atomic_load(&s->has_outstanding)))))
    s = s->next_in_bucket;
  return s;
}

static stream_t *stream_make(core_t *core, device_t *device, uint64_t id, void *handle)
{
  unsigned place = core->stream_count % GROUP_STREAMS;
  stream_group_t *group = atomic_load(&core->stream_groups);
  stream_group_t *new_group = place ? NULL : calloc(1, sizeof *new_group);
  stream_t *s = place || new_group ? host_take(sizeof *s) : NULL;
  if (!s) {
    free(new_group);
    return NULL;
  }
  mutex_init(&s->lock, LOCK_RECORD);
  s->core = core;
  s->device = device;
  s->id = id;
  s->handle = handle;
  s->index = core->stream_count++;
  s->ask_at = ASK_AT;
  if (new_group) {
    new_group->older = group;
    group = new_group;
  }
  s->group = group;
  group->stream[place] = s;
  atomic_store_explicit(&core->stream_groups, group, memory_order_release);
  _Atomic(stream_t *) *bucket = bucket_of_id(core, id, handle);
  s->next_in_bucket = atomic_load(bucket);
  atomic_store_explicit(bucket, s, memory_order_release);
  s->next = atomic_load(&core->streams);
  atomic_store(&core->streams, s);
  return s;
}

stream_t *stream_at(core_t *core, unsigned index)
{
  const stream_group_t *group = atomic_load_explicit(&core->stream_groups, memory_order_acquire);
  while (group->stream[0]->index > index)
    group = group->older;
  return group->stream[index % GROUP_STREAMS];
}

/* Retires events of the streams that had the handle before. */
static void retire_ended(core_t *core, uint64_t id, const void *handle)
{
  stream_t *s = is_special(handle) ? NULL : atomic_load(bucket_of_id(core, id, handle));
  for (; s; s = s->next_in_bucket)
    if (s->handle == handle)
      stream_retire(s);
}

stream_t *stream_create(core_t *core, device_t *device, uint64_t id, void *handle)
{
  stream_t *s = find_by_id(core, device, id, handle);
  if (s)
    return s;
  retire_ended(core, id, handle);
  lock(&core->streams_lock);
  s = find_by_id(core, device, id, handle);
  if (!s && (s = find_ended(core, device, id, handle))) {
    atomic_store(&s->last_wait, 0);
    atomic_store(&s->id, id);
  } else if (!s) {
    s = stream_make(core, device, id, handle);
  }
  unlock(&core->streams_lock);
  return s;
}

void stream_make_immortal(core_t *core, stream_t *s, void *handle)
{
  lock(&core->streams_lock);
  core_assert(s->handle == handle);
  if (!s->immortal) {
    _Atomic(stream_t *) *bucket = stream_bucket(core, handle);
    s->next_by_handle = atomic_load(bucket);
    atomic_store_explicit(bucket, s, memory_order_release);
    s->immortal = true;
  }
  unlock(&core->streams_lock);
}

esper_status stream_create_own(device_t *device, stream_t **own)
{
  core_t *core = device->core;
  void *handle;
  uint64_t id;
  esper_status status = call_stream_create(core, device->index, &handle);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  status = call_stream_id(core, device->index, handle, &id);
  if (status != ESPER_OK)
    error_from_driver(core, status);
  else if (!(*own = stream_create(core, device, id, handle)))
    status = error_set(ESPER_HOST_MEMORY, "no host memory for a stream");
  if (status == ESPER_OK)
    stream_make_immortal(core, *own, handle);
  else
    call_stream_destroy(core, device->index, handle);
  return status;
}

/* An id for a stream that is first met while it is captured; the driver's ids have no high bits. An
 * immortal stream is known by its handle from then on (`capture` is 0). Any other counts as a
 * stream of its own during the capture, which only withholds more. */
static uint64_t id_within_capture(void *handle, uint64_t capture)
{
  uint64_t id = (uintptr_t)handle * 0x9e3779b97f4a7c15u ^ capture * 0xbf58476d1ce4e5b9u;
  return (id ^ id >> 31) | 1ull << 62;
}

/* A mortal stream cannot be asked later. While it is captured it has an entry of its own. Which
 * thread a per-thread stream belongs to is not known, so its captures are not noted. */
static void note_whether_captured(stream_t *now, uint64_t capture)
{
  if (is_special(now->handle))
    return;
  if (capture) {
    atomic_store(&now->was_captured, true);
    return;
  }
  stream_t *s = atomic_load_explicit(bucket_of_id(now->core, 0, now->handle), memory_order_acquire);
  for (; s; s = s->next_in_bucket)
    if (s->handle == now->handle && s->device == now->device)
      atomic_store(&s->was_captured, false);
}

esper_status stream_present(core_t *core, esper_stream as, presented_t *presented)
{
  device_t *device = &core->devices[as.device];
  *presented = stream_presented(stream_immortal(core, device, as.handle), as.handle);
  if (presented->stream)
    return ESPER_OK;
  /* Asking for the id of a stream that is captured would end the capture. */
  uint64_t id, capture;
  esper_status status = call_stream_capture(core, as.device, as.handle, &capture);
  if (status == ESPER_OK && capture)
    id = id_within_capture(as.handle, as.flags & ESPER_STREAM_IMMORTAL ? 0 : capture);
  else if (status == ESPER_OK)
    status = call_stream_id(core, as.device, as.handle, &id);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  stream_t *s = stream_create(core, device, id, as.handle);
  if (!s)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a stream");
  if (as.flags & ESPER_STREAM_IMMORTAL)
    stream_make_immortal(core, s, as.handle);
  note_whether_captured(s, s->immortal ? 0 : capture);
  presented->stream = s;
  presented->asked = true;
  presented->capture = capture;
  return ESPER_OK;
}

/* A stream that has or had the handle. */
static stream_t *find_namesake(core_t *core, const void *handle)
{
  stream_t *s = atomic_load_explicit(bucket_of_id(core, 0, handle), memory_order_acquire);
  while (s && s->handle != handle)
    s = s->next_in_bucket;
  return s;
}

/* Asks for the id every time: the handle may have come back with another stream behind it. No two
 * streams have the same id, even on different devices. */
bool stream_find(core_t *core, void *handle, presented_t *presented)
{
  uint64_t id, capture;
  *presented = (presented_t){.stream = stream_with_handle(core, NULL, handle), .handle = handle};
  if (presented->stream)
    return true;
  const stream_t *namesake = find_namesake(core, handle);
  if (!namesake)
    return false;
  int device = namesake->device->index;
  if (call_stream_capture(core, device, handle, &capture) != ESPER_OK || capture ||
      call_stream_id(core, device, handle, &id) != ESPER_OK)
    return false;
  presented->stream = find_by_id(core, NULL, id, handle);
  presented->asked = true;
  return presented->stream != NULL;
}

void stream_destroy_all(core_t *core)
{
  for (stream_t *s = atomic_load(&core->streams), *next; s; s = next) {
    next = s->next;
    if (s->probe)
      record_drop(s->probe);
    records_reclaim(s);
    while (s->event_count)
      event_give(s->device, s->events[--s->event_count]);
    free(s);
  }
  atomic_store(&core->streams, NULL);
  for (stream_group_t *group = atomic_load(&core->stream_groups), *older; group; group = older) {
    older = group->older;
    free(group);
  }
}
