#include "stream.h"

#include <stdlib.h>

#include "call.h"
#include "error.h"
#include "event.h"

/* As many outstanding records need no question whether some have completed. */
enum { ASK_AT = 64 };

/* ---- finding streams --------------------------------------------------- */

static bool is_special(const void *handle)
{
  return (uintptr_t)handle <= 2;
}

/* What was behind the same handle one after the other is in one bucket. */
static _Atomic(stream_t *) *bucket_of_id(core_t *core, uint64_t id, const void *handle)
{
  uint64_t key = is_special(handle) ? id : (uintptr_t)handle;
  return &core->stream_by_id[key * 0x9e3779b97f4a7c15u >> 56];
}

static _Atomic(stream_t *) *bucket_of_handle(core_t *core, void *handle)
{
  return &core->stream_by_handle[(uintptr_t)handle * 0x9e3779b97f4a7c15u >> 56];
}

/* Streams are found without a lock: they stay where they are until the core goes.
 * Any device: NULL. */
static stream_t *find_by_id(core_t *core, const device_t *device, uint64_t id,
                            const void *handle)
{
  stream_t *s = atomic_load_explicit(bucket_of_id(core, id, handle), memory_order_acquire);
  while (s && (atomic_load_explicit(&s->id, memory_order_relaxed) != id ||
               s->handle != handle || (device && s->device != device)))
    s = s->next_in_bucket;
  return s;
}

/* Not the driver's, but made by id_within_capture. */
static bool is_made_up(uint64_t id)
{
  return id >> 62;
}

/* A mortal stream that has ended, since its handle has come back with another
 * id, and of which nothing is left: what is known of it serves the next one.
 * Numbers go on, so what frontiers say of the old ones stays true; its own
 * frontier is empty, because it never had memory. */
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
  stream_t *s = place || new_group ? calloc(1, sizeof *s) : NULL;
  if (!s) {
    free(new_group);
    return NULL;
  }
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

/* What has completed on streams that had the handle before. */
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
    atomic_store(&s->traits, 0);
    atomic_store(&s->id, id);
  } else if (!s) {
    s = stream_make(core, device, id, handle);
  }
  unlock(&core->streams_lock);
  return s;
}

/* Immortal streams keep their handle, so it may stand for them, however it is
 * presented. Any device: NULL. */
static stream_t *find_by_handle(core_t *core, const device_t *device, void *handle)
{
  stream_t *s = atomic_load_explicit(bucket_of_handle(core, handle), memory_order_acquire);
  while (s && (s->handle != handle || (device && s->device != device)))
    s = s->next_by_handle;
  return s;
}

void stream_make_immortal(core_t *core, stream_t *s, void *handle)
{
  lock(&core->streams_lock);
  core_assert(s->handle == handle);
  if (!s->immortal) {
    _Atomic(stream_t *) *bucket = bucket_of_handle(core, handle);
    s->next_by_handle = atomic_load(bucket);
    atomic_store_explicit(bucket, s, memory_order_release);
    s->immortal = true;
  }
  unlock(&core->streams_lock);
}

static bool is_legacy(void *handle)
{
  return (uintptr_t)handle <= 1;
}

/* What stands for the id of a stream that is first met while it is captured: the
 * driver's ids have no high bits. An immortal one is known by its handle from
 * then on (`capture` is 0). Another handle means one stream during a capture: to
 * us another stream than it is outside, which only withholds more. */
static uint64_t id_within_capture(void *handle, uint64_t capture)
{
  uint64_t id = (uintptr_t)handle * 0x9e3779b97f4a7c15u ^ capture * 0xbf58476d1ce4e5b9u;
  return (id ^ id >> 31) | 1ull << 62;
}

esper_status stream_present(core_t *core, esper_stream as, presented_t *presented)
{
  device_t *device = &core->devices[as.device];
  *presented = (presented_t){.handle = is_legacy(as.handle) ? NULL : as.handle};
  presented->stream = is_legacy(as.handle) ? device->legacy
                                           : find_by_handle(core, device, as.handle);
  if (presented->stream)
    return ESPER_OK;
  /* Asking a capturing stream for its id would end the capture. */
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
  presented->stream = s;
  presented->asked = true;
  presented->capture = capture;
  return ESPER_OK;
}

/* Some stream that had the handle last time. */
static stream_t *find_namesake(core_t *core, const void *handle)
{
  stream_t *s = atomic_load_explicit(bucket_of_id(core, 0, handle), memory_order_acquire);
  while (s && s->handle != handle)
    s = s->next_in_bucket;
  return s;
}

/* The id is asked again every time: a handle may have come back with another
 * stream behind it. Ids are never used again, on no device. */
bool stream_find(core_t *core, void *handle, presented_t *presented)
{
  uint64_t id, capture;
  *presented = (presented_t){.stream = find_by_handle(core, NULL, handle), .handle = handle};
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

static void pool_dropped(stream_t *s);

void stream_destroy_all(core_t *core)
{
  for (stream_t *s = atomic_load(&core->streams), *next; s; s = next) {
    next = s->next;
    if (s->probe)
      record_drop(s->probe);
    pool_dropped(s);
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

uint64_t stream_capture_of(presented_t p, bool recording)
{
  if (p.asked)
    return p.capture;
  if (p.stream->all_streams || (!p.handle && !recording))
    return 0;
  uint64_t capture = 0;
  esper_status status =
      call_stream_capture(p.stream->core, p.stream->device->index, p.handle, &capture);
  return status == ESPER_OK ? capture : CAPTURE_UNKNOWN;
}

/* ---- records ----------------------------------------------------------- */

void record_keep(record_t *record)
{
  atomic_fetch_add_explicit(&record->references, 1, memory_order_relaxed);
}

/* The last reference is the caller's alone: nobody can take another meanwhile. */
bool record_release(record_t *record)
{
  if (atomic_load_explicit(&record->references, memory_order_acquire) != 1)
    return atomic_fetch_sub(&record->references, 1) == 1;
  atomic_store_explicit(&record->references, 0, memory_order_relaxed);
  return true;
}

/* Any lock may be held here, so the record is only put aside; whoever next
 * holds the stream's record lock makes it a spare one. */
void record_drop(record_t *record)
{
  if (!record_release(record))
    return;
  stream_t *s = record->stream;
  record->next_dropped = atomic_load(&s->dropped);
  while (!atomic_compare_exchange_weak(&s->dropped, &record->next_dropped, record))
    ;
}

static uint64_t bit_of(const stream_t *s)
{
  return 1ull << s->index % GROUP_STREAMS;
}

static void link_outstanding(stream_t *s, record_t *r)
{
  r->newer = NULL;
  r->older = s->newest;
  *(s->newest ? &s->newest->newer : &s->oldest) = r;
  if (s->oldest == r)
    atomic_store_explicit(&s->oldest_us, r->time_us, memory_order_relaxed);
  s->newest = r;
  r->outstanding = true;
  s->outstanding++;
  atomic_store_explicit(&s->has_outstanding, true, memory_order_release);
  if (!s->listed)
    atomic_fetch_or(&s->group->listed, bit_of(s));
  s->listed = true;
}

static void unlink_outstanding(stream_t *s, record_t *r)
{
  *(r->older ? &r->older->newer : &s->oldest) = r->newer;
  *(r->newer ? &r->newer->older : &s->newest) = r->older;
  if (s->oldest)
    atomic_store_explicit(&s->oldest_us, s->oldest->time_us, memory_order_relaxed);
  r->older = r->newer = NULL;
  r->outstanding = false;
  s->outstanding--;
  atomic_store_explicit(&s->has_outstanding, s->oldest != NULL, memory_order_release);
}

/* A stream keeps its own events and records for the next time, so that a
 * record takes no lock but its own. */
static void keep_event(stream_t *s, void *event)
{
  if (s->event_count < STREAM_EVENTS)
    s->events[s->event_count++] = event;
  else
    event_give(s->device, event);
}

static void keep_spare(stream_t *s, record_t *r)
{
  r->next_dropped = s->spare;
  s->spare = r;
}

/* Nobody refers to the record. */
static void reuse(stream_t *s, record_t *r)
{
  if (r->outstanding)
    unlink_outstanding(s, r);
  if (r->event)
    keep_event(s, r->event);
  keep_spare(s, r);
}

static void pool_dropped(stream_t *s)
{
  if (!atomic_load_explicit(&s->dropped, memory_order_relaxed))
    return;
  record_t *r = atomic_exchange(&s->dropped, NULL);
  while (r) {
    record_t *next = r->next_dropped;
    reuse(s, r);
    r = next;
  }
}

/* A record with an event, both out of use; NULL: none can be had. The record
 * lock is held, but not while the driver makes an event. */
static record_t *take_spare(stream_t *s)
{
  record_t *r = s->spare;
  void *event = s->event_count ? s->events[--s->event_count] : NULL;
  if (r)
    s->spare = r->next_dropped;
  if (!r || !event) {
    unlock(&s->lock);
    if (!r)
      r = record_take(s->device);
    if (r && !event)
      event = event_take(s->device);
    lock(&s->lock);
  }
  if (r && event) {
    r->stream = s;
    r->event = event;
    atomic_store_explicit(&r->references, 1, memory_order_relaxed);
    atomic_store_explicit(&r->pins, 0, memory_order_relaxed);
    return r;
  }
  if (event)
    keep_event(s, event);
  if (r)
    keep_spare(s, r);
  return NULL;
}

static esper_status record_event(presented_t p, void *event)
{
  stream_t *s = p.stream;
  if (s->all_streams)
    return call_event_record_all(s->core, s->device->index, event);
  return call_event_record(s->core, s->device->index, event, p.handle);
}

static bool record_is_done(record_t *r);
static void completed_up_to(stream_t *s, uint64_t number);

/* Marks of long-lived blocks pin no events: one question now and then, about
 * the record in the middle. If it is not done either there are twice as many
 * before the next one. */
static void ask_now_and_then(stream_t *s)
{
  if (s->outstanding < s->ask_at)
    return;
  record_t *middle = s->oldest;
  for (unsigned i = 1; i < s->outstanding / 2; i++)
    middle = middle->newer;
  bool done = record_is_done(middle);
  if (done)
    completed_up_to(s, middle->number);
  s->ask_at = s->outstanding + (done ? ASK_AT : s->outstanding);
}

/* Number and event in one step: otherwise number 6 could be recorded before
 * 5, and a wait for 6 would be taken to cover 5. `wait_for` is a foreign event
 * that the stream waits for in the same step. The record lock stays held unless
 * it failed. */
static record_t *record_on(presented_t p, void *wait_for)
{
  stream_t *s = p.stream;
  lock(&s->lock);
  pool_dropped(s);
  ask_now_and_then(s);
  record_t *r = take_spare(s);
  if (!r) {
    unlock(&s->lock);
    return NULL;
  }
  if (!RULE(NUMBER_WITH_RECORD))
    unlock(&s->lock);
  r->time_us = atomic_load_explicit(&s->core->timing, memory_order_relaxed)
                   ? s->core->clock_us()
                   : 0;
  if (RULE(NUMBER_WITH_RECORD)) { /* nobody else takes one meanwhile */
    r->number = atomic_load_explicit(&s->last, memory_order_relaxed) + 1;
    atomic_store_explicit(&s->last, r->number, memory_order_release);
  } else {
    r->number = atomic_fetch_add(&s->last, 1) + 1;
  }
  esper_status status = ESPER_OK;
  if (wait_for)
    status = call_stream_wait(s->core, s->device->index, p.handle, wait_for);
  if (status == ESPER_OK)
    status = record_event(p, r->event);
  if (!RULE(NUMBER_WITH_RECORD))
    lock(&s->lock);
  if (status != ESPER_OK) {
    keep_event(s, r->event);
    keep_spare(s, r);
    unlock(&s->lock);
    error_from_driver(s->core, status);
    return NULL;
  }
  link_outstanding(s, r);
  if (!RULE(EVENTS_IMMUTABLE))
    event_give(s->device, r->event);
  return r;
}

/* An event for all of a device's work would end the captures there. */
static bool any_is_captured(const device_t *device)
{
  for (stream_t *s = atomic_load(&device->core->streams); s; s = s->next)
    if (s->device == device && s->immortal && !s->all_streams &&
        stream_capture_of((presented_t){.stream = s, .handle = s->handle}, true))
      return true;
  return false;
}

record_t *stream_record_begin(presented_t p)
{
  if (RULE(CAPTURE_RECORDS_NOTHING) && stream_capture_of(p, true))
    return NULL;
  if (p.stream->all_streams && any_is_captured(p.stream->device))
    return NULL;
  return record_on(p, NULL);
}

void stream_record_end(stream_t *s, record_t *replaced)
{
  if (replaced)
    reuse(s, replaced);
  unlock(&s->lock);
}

record_t *stream_record(presented_t p)
{
  record_t *record = stream_record_begin(p);
  if (record)
    stream_record_end(p.stream, NULL);
  return record;
}

record_t *stream_record_later(stream_t *s)
{
  if (RULE(MORTAL_HANDLES) && !s->immortal)
    return NULL;
  return stream_record((presented_t){.stream = s, .handle = s->handle});
}

record_t *stream_record_event(stream_t *carrier, void *event, int device)
{
  /* A captured event would drag the carrier into its capture. */
  core_t *core = carrier->core;
  esper_status status = call_event_query(core, device, event);
  if (status != ESPER_OK && status != ESPER_NOT_READY)
    return NULL;
  record_t *record =
      record_on((presented_t){.stream = carrier, .handle = carrier->handle}, event);
  if (record)
    unlock(&carrier->lock);
  return record;
}

record_t *stream_probe(stream_t *s, uint64_t stamp)
{
  lock(&s->lock);
  record_t *probe = s->probe;
  if (probe)
    record_keep(probe);
  unlock(&s->lock);
  if (probe && probe->number >= stamp)
    return probe;
  if (probe)
    record_drop(probe);
  probe = stream_record_later(s);
  if (!probe)
    return NULL;
  record_keep(probe);
  lock(&s->lock);
  record_t *old = s->probe;
  s->probe = probe;
  unlock(&s->lock);
  if (old)
    record_drop(old);
  return probe;
}

gate_result stream_gate(presented_t p, record_t *record)
{
  stream_t *r = p.stream, *s = record->stream;
  gate_result result = GATE_NEEDLESS;
  /* Pinned, the event stays the record's while we use it: stream_retire
   * raises `completed` first and looks at the pins second. */
  atomic_fetch_add(&record->pins, 1);
  if (!stream_completed(s, record->number)) {
    lock(&r->lock);
    _Atomic uint64_t *row = s->index < FRONTIER_ROWS ? &r->frontier[s->index] : NULL;
    bool ordered = row && atomic_load(row) >= record->number;
    if (!ordered || !RULE(GATE_IS_REMEMBERED)) {
      if (!RULE(FRONTIER_AFTER_WAIT) && row)
        atomic_store(row, record->number);
      result = call_stream_wait(r->core, r->device->index, p.handle, record->event) == ESPER_OK
                   ? GATE_ISSUED
                   : GATE_REFUSED;
      if (result == GATE_ISSUED && row)
        atomic_store(row, record->number);
      if (result == GATE_ISSUED && row && !RULE(GATE_RAISES_ONE))
        for (int i = 0; i < FRONTIER_ROWS; i++)
          if (atomic_load(&s->frontier[i]) > atomic_load(&r->frontier[i]))
            atomic_store(&r->frontier[i], atomic_load(&s->frontier[i]));
    }
    unlock(&r->lock);
  }
  atomic_fetch_sub(&record->pins, 1);
  if (result != GATE_REFUSED)
    atomic_fetch_add(&r->core->epoch, 1);
  return result;
}

int64_t stream_lag_us(const stream_t *s, int64_t now_us)
{
  if (!atomic_load_explicit(&s->has_outstanding, memory_order_acquire))
    return 0;
  int64_t oldest_us = atomic_load_explicit(&s->oldest_us, memory_order_relaxed);
  return oldest_us ? now_us - oldest_us : INT64_MAX;
}

/* ---- traits ------------------------------------------------------------ */

void stream_set_traits(stream_t *stream, unsigned traits)
{
  core_t *core = stream->core;
  unsigned any = 0;
  lock(&core->streams_lock);
  atomic_store(&stream->traits, traits);
  for (stream_t *s = atomic_load(&core->streams); s; s = s->next)
    if (s->device == stream->device && !s->all_streams)
      any |= atomic_load(&s->traits);
  atomic_store(&stream->device->all_streams->traits, any);
  unlock(&core->streams_lock);
}

/* ---- retiring ---------------------------------------------------------- */

static void completed_up_to(stream_t *s, uint64_t number)
{
  bool news = number > atomic_load(&s->completed);
  if (news)
    atomic_store(&s->completed, number);
  while (s->oldest && s->oldest->number <= number) {
    record_t *r = s->oldest;
    unlink_outstanding(s, r);
    if (!atomic_load(&r->pins)) {
      keep_event(s, r->event);
      r->event = NULL;
    }
  }
  if (news)
    atomic_fetch_add(&s->core->epoch, 1);
}

static bool record_is_done(record_t *r)
{
  esper_status status = call_event_query(r->stream->core, r->stream->device->index, r->event);
  if (!RULE(FAILED_QUERY_HOLDS) && status != ESPER_NOT_READY)
    return true;
  return status == ESPER_OK;
}

/* Events complete in the order of their numbers, so the search gallops: it
 * asks about the oldest, then twice as far ahead each time it was done. */
void stream_retire(stream_t *s)
{
  if (!(atomic_load_explicit(&s->group->listed, memory_order_relaxed) & bit_of(s)) &&
      !atomic_load_explicit(&s->dropped, memory_order_relaxed))
    return;
  lock(&s->lock);
  pool_dropped(s);
  size_t step = 1;
  while (s->oldest) {
    record_t *ahead = s->oldest;
    for (size_t i = 1; i < step && ahead->newer; i++)
      ahead = ahead->newer;
    if (record_is_done(ahead)) {
      completed_up_to(s, ahead->number);
      step *= 2;
    } else if (ahead != s->oldest) {
      step = 1; /* overshot */
    } else {
      break;
    }
  }
  s->ask_at = s->outstanding + ASK_AT;
  if (!s->oldest && s->listed) {
    s->listed = false;
    atomic_fetch_and(&s->group->listed, ~bit_of(s));
  }
  unlock(&s->lock);
}

void stream_retire_all(core_t *core)
{
  for (stream_group_t *group = atomic_load(&core->stream_groups); group; group = group->older)
    for (uint64_t left = atomic_load(&group->listed); left; left &= left - 1)
      stream_retire(group->stream[__builtin_ctzll(left)]);
}

static void declare_completed(stream_t *s, uint64_t number)
{
  lock(&s->lock);
  pool_dropped(s);
  completed_up_to(s, number);
  unlock(&s->lock);
}

esper_status stream_wait_host(record_t *record)
{
  stream_t *s = record->stream;
  esper_status status = ESPER_OK;
  atomic_fetch_add(&record->pins, 1);
  if (!stream_completed(s, record->number))
    status = call_event_synchronize(s->core, s->device->index, record->event);
  atomic_fetch_sub(&record->pins, 1);
  if (status == ESPER_OK)
    declare_completed(s, record->number);
  else
    error_from_driver(s->core, status);
  return status;
}

void stream_sync_begin(stream_t *s)
{
  lock(&s->lock);
  s->syncing = atomic_fetch_add(&s->last, 1) + 1;
  unlock(&s->lock);
}

void stream_sync_done(stream_t *s)
{
  declare_completed(s, s->syncing);
}

bool stream_is_valid(stream_t *s)
{
  bool valid = true;
  unsigned outstanding = 0;
  lock(&s->lock);
  pool_dropped(s);
  uint64_t previous = atomic_load(&s->completed);
  for (record_t *r = s->oldest; r; r = r->newer) {
    /* No references: somebody is just putting it aside. */
    valid &= r->stream == s && r->outstanding && r->event && r->references >= 0;
    valid &= r->number > previous && r->number <= atomic_load(&s->last);
    valid &= r->newer ? r->newer->older == r : s->newest == r;
    previous = r->number;
    outstanding++;
  }
  valid &= atomic_load(&s->has_outstanding) == (s->oldest != NULL);
  valid &= outstanding == s->outstanding && s->event_count <= STREAM_EVENTS;
  valid &= s->group->stream[s->index % GROUP_STREAMS] == s;
  valid &= s->listed == (atomic_load(&s->group->listed) >> s->index % GROUP_STREAMS & 1);
  valid &= s->listed || !s->oldest;
  unlock(&s->lock);
  return valid;
}
