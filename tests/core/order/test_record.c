/* The records of a stream: their numbers and references, and when none is made. */
#include "core/order/record.h"

#include "core/order/capturing.h"
#include "core/order/event.h"
#include "core/order/retire.h"
#include "streams_world.h"

SCENE(a_dropped_record_gives_its_event_back)
{
  presented_t s = present(w.stream[0]);
  sim_wait_flag(w.s, 0, s.handle, 0); /* nothing completes */
  for (int i = 0; i < 100; i++)
    record_drop(stream_record(s));
  CHECK(device->events_created < 10);
  CHECK(stream_is_valid(s.stream));
  sim_raise_flag_now(w.s, 0);
}

SCENE(a_mortal_streams_handle_is_not_used_later)
{
  presented_t s = present(world_mortal(&w, 0));
  CHECK(!stream_record_unpresented(s.stream));
  CHECK(!stream_probe(s.stream, 1));
  record_t *record = stream_record(s); /* but now */
  CHECK(record);
  record_drop(record);
}

SCENE(a_failed_record_takes_its_number_and_nothing_else)
{
  presented_t s = present(w.stream[0]);
  sim_fail_call(w.s, SIM_CALL_event_record, 1, ESPER_DEVICE_ERROR);
  CHECK(!stream_record(s));
  sim_fail_call(w.s, SIM_CALL_event_create, 1, ESPER_OUT_OF_MEMORY);
  stream_t *other = present(w.stream[1]).stream;
  CHECK(stream_is_valid(s.stream) && stream_is_valid(other));
  sim_fail_call(w.s, SIM_CALL_event_create, 0, ESPER_OK);
  record_t *record = stream_record(s);
  CHECK(record && stream_is_valid(s.stream));
  CHECK_EQ(device->events_created, 1);
  record_drop(record);
}

SCENE(an_event_that_somebody_is_using_stays_with_its_record)
{
  presented_t s = present(w.stream[0]);
  record_t *pinned = stream_record(s), *other = stream_record(s);
  atomic_fetch_add(&pinned->pins, 1);
  sim_run_all(w.s);
  stream_retire(s.stream);
  CHECK(stream_completed(s.stream, 2));
  CHECK(pinned->event && !other->event);
  record_t *next = stream_record(s);
  CHECK(next->event != pinned->event);
  atomic_fetch_sub(&pinned->pins, 1);
  void *event = pinned->event;
  record_drop(pinned);
  record_drop(other);
  record_drop(next);
  next = stream_record(s);
  CHECK_EQ(device->events_created, 2);
  record_t *last = stream_record(s);
  CHECK(next->event == event || last->event == event); /* it was not lost */
  record_drop(next);
  record_drop(last);
}

SIM_HOOK(begin_a_capture)
{
  sim_capture_begin(w.s, 0, context);
}

/* Another thread begins it between the question and the event: the record is withdrawn. */
SCENE(a_capture_that_begins_meanwhile_gets_no_record)
{
  presented_t s = present(w.stream[0]);
  sim_after_call(w.s, SIM_CALL_event_record, begin_a_capture, s.handle);
  CHECK(!stream_record(s));
  sim_after_call(w.s, SIM_CALL_event_record, NULL, NULL);
  CHECK(stream_is_valid(s.stream) && !s.stream->oldest);
  sim_capture_abort(w.s, 0, s.handle);
}

static void record_until(unsigned outstanding, presented_t s, record_t **r, int *count)
{
  while (s.stream->outstanding < outstanding)
    r[(*count)++] = stream_record(s);
}

/* Of many outstanding records a mark asks about the one in the middle. */
SCENE(a_mark_asks_now_and_then_what_has_completed)
{
  enum { MOST = 8 * ASK_AT };
  presented_t s = present(w.stream[0]);
  record_t *r[MOST];
  int count = 0;
  record_until(ASK_AT, s, r, &count);
  CHECK_EQ(queries(), 0);
  record_until(2 * ASK_AT, s, r, &count);
  CHECK_EQ(queries(), 1);
  record_until(4 * ASK_AT, s, r, &count); /* the answer was no: twice as many, then */
  CHECK_EQ(queries(), 2);
  sim_run_all(w.s);
  r[count++] = stream_record(s);
  CHECK_EQ(queries(), 3);
  CHECK_EQ(s.stream->completed, 2 * ASK_AT);
  record_until(3 * ASK_AT, s, r, &count);
  CHECK_EQ(queries(), 3);
  r[count++] = stream_record(s); /* the answer was yes: so many more are enough */
  CHECK_EQ(queries(), 4);
  CHECK(stream_is_valid(s.stream));
  while (count)
    record_drop(r[--count]);
}

SCENE(a_foreign_event_that_cannot_be_waited_for_leaves_no_record)
{
  presented_t carrier = present(w.stream[0]);
  void *event = sim_event_create(w.s, 0);
  sim_fail_call(w.s, SIM_CALL_stream_wait, 1, ESPER_DEVICE_ERROR);
  CHECK(!stream_record_event(carrier.stream, event, 0));
  CHECK(!carrier.stream->oldest);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_event_record), 0);
  CHECK(stream_is_valid(carrier.stream));
  sim_event_destroy(w.s, 0, event);
}

SCENE(a_stream_keeps_some_spare_records_and_the_device_gets_the_others)
{
  enum { MANY = STREAM_EVENTS + 10 };
  presented_t s = present(w.stream[0]);
  record_t *record[MANY];
  for (int i = 0; i < MANY; i++)
    CHECK((record[i] = stream_record(s)));
  CHECK_EQ(device->records.live, MANY);
  for (int i = 0; i < MANY; i++)
    record_drop(record[i]);
  lock(&s.stream->lock);
  records_reclaim(s.stream);
  unlock(&s.stream->lock);
  CHECK_EQ(device->records.live, STREAM_EVENTS);
  CHECK_EQ(s.stream->spare_count, STREAM_EVENTS);
  CHECK(stream_is_valid(s.stream) && records_are_valid(device));
  record_drop(stream_record(s)); /* a spare one */
  CHECK_EQ(device->records.live, STREAM_EVENTS);
}
