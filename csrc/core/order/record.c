#include "record.h"

#include "../base/call.h"
#include "../base/error.h"
#include "capturing.h"
#include "event.h"

/* ---- references, outstanding and spare --------------------------------- */

void record_keep(record_t *record)
{
  atomic_fetch_add_explicit(&record->references, 1, memory_order_relaxed);
}

/* If the count is 1, it is the caller's own reference, and no other thread can add one. */
bool record_release(record_t *record)
{
  if (atomic_load_explicit(&record->references, memory_order_acquire) != 1)
    return atomic_fetch_sub(&record->references, 1) == 1;
  atomic_store_explicit(&record->references, 0, memory_order_relaxed);
  return true;
}

/* Any lock may be held here, so the record only joins the dropped ones. The next work under
 * the stream's record lock makes it a spare one. */
void record_drop(record_t *record)
{
  if (!record_release(record))
    return;
  stream_t *s = record->stream;
  record->next_dropped = atomic_load(&s->dropped);
  while (!atomic_compare_exchange_weak(&s->dropped, &record->next_dropped, record))
    ;
}

static void link_outstanding(stream_t *s, record_t *r)
{
  r->newer = NULL;
  r->older = s->newest;
  *(s->newest ? &s->newest->newer : &s->oldest) = r;
  s->newest = r;
  r->outstanding = true;
  s->outstanding++;
  atomic_store_explicit(&s->has_outstanding, true, memory_order_release);
  if (!s->listed)
    atomic_fetch_or(&s->group->listed, group_bit(s));
  s->listed = true;
}

static void unlink_outstanding(stream_t *s, record_t *r)
{
  *(r->older ? &r->older->newer : &s->oldest) = r->newer;
  *(r->newer ? &r->newer->older : &s->newest) = r->older;
  r->older = r->newer = NULL;
  r->outstanding = false;
  s->outstanding--;
  atomic_store_explicit(&s->has_outstanding, s->oldest != NULL, memory_order_release);
}

/* A stream keeps its own events and records for reuse, so that recording takes no lock but its
 * own. */
static void keep_event(stream_t *s, void *event)
{
  if (s->event_count < STREAM_EVENTS)
    s->events[s->event_count++] = event;
  else
    event_give(s->device, event);
}

static void keep_spare(stream_t *s, record_t *r)
{
  if (s->spare_count == STREAM_EVENTS) {
    record_give(s->device, r);
    return;
  }
  s->spare_count++;
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

void records_reclaim(stream_t *s)
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

/* A record with an event, both out of use. NULL: none can be had. The record lock is held, but
 * given up while the driver makes an event. */
static record_t *take_spare(stream_t *s)
{
  record_t *r = s->spare;
  void *event = s->event_count ? s->events[--s->event_count] : NULL;
  if (r) {
    s->spare = r->next_dropped;
    s->spare_count--;
  }
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
    r->captured = false;
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

bool record_is_done(record_t *r)
{
  esper_status status = call_event_query(r->stream->core, r->stream->device->index, r->event);
  if (!RULE(FAILED_QUERY_HOLDS) && status != ESPER_NOT_READY)
    return true;
  r->captured = status == ESPER_CAPTURING;
  return status == ESPER_OK;
}

void records_complete(stream_t *s, uint64_t number)
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
  if (news) {
    atomic_fetch_add(&s->core->progress, 1);
    atomic_fetch_add(&s->core->completions, 1);
  }
}

/* ---- recording --------------------------------------------------------- */

/* An event for all of a device's work ends every capture. That of a stream which the core has not
 * met, and which nobody announced, is known only when it has been ended: the user is told how to
 * announce the next one. */
static esper_status record_event_for_all(stream_t *all, void *event)
{
  if (capturing_is_possible_now(all->device))
    return ESPER_CAPTURING;
  esper_status status = call_event_record_all(all->core, all->device->index, event);
  if (status == ESPER_CAPTURING)
    atomic_store_explicit(&all->core->ended_a_capture, true, memory_order_relaxed);
  return status;
}

static esper_status record_event(presented_t p, void *event)
{
  stream_t *s = p.stream;
  return s->all_streams ? record_event_for_all(s, event)
                        : call_event_record(s->core, s->device->index, event, p.handle);
}

/* A program that only marks long-lived blocks would collect events. So a mark asks now and then
 * about the record in the middle. If that has not completed, the next question comes when twice as
 * many are outstanding. */
static void ask_now_and_then(stream_t *s)
{
  if (s->outstanding < s->ask_at)
    return;
  record_t *middle = s->oldest;
  for (unsigned i = 1; i < s->outstanding / 2; i++)
    middle = middle->newer;
  bool done = record_is_done(middle);
  if (done)
    records_complete(s, middle->number);
  s->ask_at = s->outstanding + (done ? ASK_AT : s->outstanding);
}

/* Takes the number and records the event in one step: otherwise number 6 could be recorded before
 * 5, and a wait for 6 would be taken to cover 5. `wait_for` may be a foreign event that the stream
 * waits for in the same step. On success the record lock stays held. */
static record_t *record_on(presented_t p, void *wait_for)
{
  stream_t *s = p.stream;
  lock(&s->lock);
  records_reclaim(s);
  ask_now_and_then(s);
  record_t *r = take_spare(s);
  if (!r) {
    unlock(&s->lock);
    return NULL;
  }
  r->number = atomic_load_explicit(&s->last, memory_order_relaxed) + 1;
  atomic_store_explicit(&s->last, r->number, memory_order_release);
  if (!RULE(NUMBER_WITH_RECORD))
    unlock(&s->lock);
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

static bool is_captured(presented_t *p)
{
  p->capture = stream_capture_of(*p, true);
  p->asked = true;
  return p->capture;
}

/* Whoever waited for an event that is part of a capture would join it, and on the legacy stream,
 * which cannot be captured, an event can end the captures of others. Another thread may begin a
 * capture after the question, so the driver is asked again. No other thread has seen the record
 * yet, so it can be withdrawn. */
static record_t *record_outside(presented_t *p)
{
  if (is_captured(p))
    return NULL;
  record_t *record = record_on(*p, NULL);
  if (!record || stream_is_legacy(p->handle))
    return record;
  p->asked = false;
  if (!is_captured(p))
    return record;
  (void)record_release(record);
  stream_record_end(p->stream, record);
  return NULL;
}

record_t *stream_record_begin(presented_t *p)
{
  if (!RULE(CAPTURE_RECORDS_NOTHING))
    return record_on(*p, NULL);
  if (!p->stream->all_streams)
    return record_outside(p);
  return stream_any_may_be_captured(p->stream->device) ? NULL : record_on(*p, NULL);
}

void stream_record_end(stream_t *s, record_t *replaced)
{
  if (replaced)
    reuse(s, replaced);
  unlock(&s->lock);
}

record_t *stream_record(presented_t p)
{
  record_t *record = stream_record_begin(&p);
  if (record)
    stream_record_end(p.stream, NULL);
  return record;
}

record_t *stream_record_unpresented(stream_t *s)
{
  if (RULE(MORTAL_HANDLES) && !s->immortal)
    return NULL;
  return stream_record((presented_t){.stream = s, .handle = s->handle});
}

record_t *stream_record_event(stream_t *carrier, void *event, int device)
{
  /* Waiting for a captured event would draw the carrier into the capture. */
  core_t *core = carrier->core;
  esper_status status = call_event_query(core, device, event);
  if (status != ESPER_OK && status != ESPER_NOT_READY)
    return NULL;
  record_t *record = record_on((presented_t){.stream = carrier, .handle = carrier->handle}, event);
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
  probe = stream_record_unpresented(s);
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

bool stream_is_valid(stream_t *s)
{
  bool valid = true;
  unsigned outstanding = 0;
  lock(&s->lock);
  records_reclaim(s);
  uint64_t previous = atomic_load(&s->completed);
  for (record_t *r = s->oldest; r; r = r->newer) {
    /* With no references it is just being dropped. */
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
