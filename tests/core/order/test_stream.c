/* Streams, their numbers and vector clocks, tested from inside. */
#include "core/order/stream.h"

#include <pthread.h>

#include "core/order/event.h"
#include "world.h"
#include "core/order/capturing.h"
#include "core/order/record.h"

static world w;
static device_t *device;

static void begin(void)
{
  world_begin(&w);
  world_free(&w, world_malloc(&w, 512, w.stream[0]));
  device = &w.core->devices[0];
}

static void end(void)
{
  world_end(&w);
}

static presented_t present(esper_stream as)
{
  presented_t p;
  CHECK_OK(stream_present(w.core, as, &p));
  return p;
}

static uint64_t queries(void)
{
  return sim_calls(w.s, SIM_CALL_event_query);
}

TEST(a_stream_is_known_by_its_id)
{
  begin();
  esper_stream a = world_mortal(&w, 0);
  stream_t *first = present(a).stream;
  CHECK(present(a).stream == first);
  CHECK_EQ(first->id, sim_stream_id(w.s, 0, a.handle));
  record_t *outstanding = stream_record(present(a));
  world_destroy_stream(&w, a);
  esper_stream b = world_mortal(&w, 0);
  CHECK(b.handle == a.handle);
  CHECK(present(b).stream != first);
  CHECK_EQ(present(b).stream->id, sim_stream_id(w.s, 0, b.handle));
  record_drop(outstanding);
  end();
}

/* Whether ids of two devices can be equal, CUDA does not say. */
TEST(the_same_id_on_another_device_is_another_stream)
{
  sim_options options = {.devices = 2};
  world_begin_with(&w, &options, NULL);
  device_t *devices = w.core->devices;
  stream_t *a = stream_create(w.core, &devices[0], 7, NULL);
  stream_t *b = stream_create(w.core, &devices[1], 7, NULL);
  CHECK(a != b && b->device == &devices[1]);
  CHECK(stream_create(w.core, &devices[0], 7, NULL) == a);
  end();
}

TEST(an_immortal_stream_is_looked_up_without_the_driver)
{
  begin();
  stream_t *first = present(w.stream[3]).stream;
  uint64_t asked = sim_calls(w.s, SIM_CALL_stream_id);
  for (int i = 0; i < 10; i++)
    CHECK(present(w.stream[3]).stream == first);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_stream_id), asked);
  esper_stream mortal = world_mortal(&w, 0);
  for (int i = 0; i < 10; i++)
    present(mortal);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_stream_id), asked + 10);
  end();
}

/* Streams that only read, each for a while: what is known of one serves the
 * next, and the numbers go on. */
TEST(streams_that_come_and_go_take_no_memory)
{
  begin();
  void *x = world_malloc(&w, 512, w.stream[0]);
  unsigned before = 0;
  uint64_t last = 0;
  for (int i = 0; i < 1000; i++) {
    esper_stream mortal = world_mortal(&w, 0);
    world_read_on(&w, mortal, x, w.stream[0]);
    world_use(&w, x, mortal, 0);
    CHECK_EQ(present(mortal).stream->id, sim_stream_id(w.s, 0, mortal.handle));
    CHECK(present(mortal).stream->last > last);
    last = present(mortal).stream->last;
    world_run(&w, w.stream[0]);
    world_run(&w, mortal);
    world_destroy_stream(&w, mortal);
    if (i == 0)
      before = w.core->stream_count;
  }
  CHECK_EQ(w.core->stream_count, before);
  CHECK_EQ(world_counters(&w, 0).uses_pending, 1);
  end();
}

/* Of thousands that were there once only the busy ones are asked. */
TEST(retiring_asks_only_streams_with_outstanding_records)
{
  begin();
  enum { MANY = 300 };
  for (int i = 0; i < MANY; i++)
    record_drop(stream_record(present(world_stream(&w, 0))));
  sim_run_all(w.s);
  stream_retire_all(w.core);
  uint64_t listed = 0;
  for (stream_group_t *g = w.core->stream_groups; g; g = g->older)
    listed |= g->listed;
  CHECK_EQ(listed, 0);
  presented_t s = present(w.stream[1]);
  record_t *record = stream_record(s);
  for (stream_group_t *g = w.core->stream_groups; g; g = g->older)
    CHECK_EQ(g->listed, g == s.stream->group ? 1ull << s.stream->index % GROUP_STREAMS : 0);
  uint64_t before = queries();
  stream_retire_all(w.core);
  CHECK_EQ(queries(), before + 1);
  record_drop(record);
  end();
}

static void *present_own(void *stream)
{
  *(stream_t **)stream = present((esper_stream){(void *)2, 0, 0}).stream;
  return NULL;
}

TEST(special_handles)
{
  begin();
  CHECK(present((esper_stream){NULL, 0, 0}).stream == device->legacy);
  CHECK(present((esper_stream){(void *)1, 0, 0}).stream == device->legacy);
  stream_t *mine, *again, *others;
  present_own(&mine);
  present_own(&again);
  CHECK(mine == again && mine != device->legacy);
  pthread_t thread;
  pthread_create(&thread, NULL, present_own, &others);
  pthread_join(thread, NULL);
  CHECK(others != mine);
  end();
}

TEST(records_are_numbered_and_complete_in_order)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *r[9];
  for (int i = 0; i < 9; i++) {
    sim_kernel(w.s, 0, s.handle, NULL, 0, SIM_READ);
    r[i] = stream_record(s);
    CHECK_EQ(r[i]->number, i + 1);
  }
  stream_retire(s.stream);
  CHECK_EQ(s.stream->completed, 0);
  sim_run_stream(w.s, 0, s.handle, 10);
  stream_retire(s.stream);
  CHECK_EQ(s.stream->completed, 5);
  CHECK(stream_completed(s.stream, 5) && !stream_completed(s.stream, 6));
  CHECK(!r[4]->event && r[5]->event); /* back in the pool */
  CHECK(stream_is_valid(s.stream));
  sim_run_all(w.s);
  stream_retire(s.stream);
  CHECK_EQ(s.stream->completed, 9);
  CHECK(!s.stream->oldest);
  for (int i = 0; i < 9; i++)
    record_drop(r[i]);
  end();
}

/* With a thousand events done, far fewer are asked about. */
TEST(retiring_gallops)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *r[1000];
  for (int i = 0; i < 1000; i++)
    r[i] = stream_record(s);
  sim_run_stream(w.s, 0, s.handle, 700);
  uint64_t before = queries();
  stream_retire(s.stream);
  CHECK_EQ(s.stream->completed, 700);
  CHECK(queries() - before < 60);
  before = queries();
  stream_retire(s.stream); /* one question when nothing has changed */
  CHECK_EQ(queries() - before, 1);
  for (int i = 0; i < 1000; i++)
    record_drop(r[i]);
  end();
}

TEST(a_dropped_record_gives_its_event_back)
{
  begin();
  presented_t s = present(w.stream[0]);
  sim_wait_flag(w.s, 0, s.handle, 0); /* nothing completes */
  for (int i = 0; i < 100; i++)
    record_drop(stream_record(s));
  CHECK(device->events_created < 10);
  CHECK(stream_is_valid(s.stream));
  sim_raise_flag_now(w.s, 0);
  end();
}

TEST(a_gate_raises_the_frontier_once_the_wait_succeeded)
{
  begin();
  presented_t r = present(w.stream[0]), s = present(w.stream[1]);
  record_t *record = stream_record(s);
  CHECK(!stream_is_after(r.stream, s.stream, 1));
  sim_fail_call(w.s, SIM_CALL_stream_wait, 1, ESPER_DEVICE_ERROR);
  CHECK(!stream_gate(r, record));
  CHECK(!stream_is_after(r.stream, s.stream, 1));
  CHECK(stream_gate(r, record));
  CHECK(stream_is_after(r.stream, s.stream, 1));
  CHECK(!stream_is_after(r.stream, s.stream, 2));
  CHECK(!stream_is_after(s.stream, r.stream, 1));
  uint64_t waits = sim_calls(w.s, SIM_CALL_stream_wait);
  CHECK(stream_gate(r, record)); /* known already */
  CHECK_EQ(sim_calls(w.s, SIM_CALL_stream_wait), waits);
  record_drop(record);
  end();
}

TEST(a_completed_record_needs_no_gate)
{
  begin();
  presented_t r = present(w.stream[0]), s = present(w.stream[1]);
  record_t *record = stream_record(s);
  sim_run_all(w.s);
  stream_retire(s.stream);
  CHECK(stream_gate(r, record));
  CHECK_EQ(sim_calls(w.s, SIM_CALL_stream_wait), 0);
  record_drop(record);
  end();
}

TEST(the_stamp_is_after_all_that_was_recorded)
{
  begin();
  presented_t s = present(w.stream[0]);
  CHECK_EQ(stream_stamp(s.stream), 1);
  record_drop(stream_record(s));
  CHECK_EQ(stream_stamp(s.stream), 2);
  record_t *probe = stream_probe(s.stream, 2);
  CHECK_EQ(probe->number, 2);
  record_t *same = stream_probe(s.stream, 2); /* serves again */
  CHECK(same == probe);
  record_t *later = stream_probe(s.stream, 3);
  CHECK(later->number >= 3);
  record_drop(probe);
  record_drop(same);
  record_drop(later);
  end();
}

TEST(a_mortal_streams_handle_is_not_used_later)
{
  begin();
  presented_t s = present(world_mortal(&w, 0));
  CHECK(!stream_record_later(s.stream));
  CHECK(!stream_probe(s.stream, 1));
  record_t *record = stream_record(s); /* but now */
  CHECK(record);
  record_drop(record);
  end();
}

TEST(on_a_capturing_stream_nothing_is_recorded)
{
  begin();
  presented_t s = present(w.stream[0]);
  sim_capture_begin(w.s, 0, s.handle);
  CHECK(stream_capture_of(s, true) != 0);
  CHECK(!stream_record(s));
  CHECK(!stream_record_later(s.stream));
  sim_capture_abort(w.s, 0, s.handle);
  CHECK_EQ(stream_capture_of(s, true), 0);
  sim_fail_call(w.s, SIM_CALL_stream_capture, 1, ESPER_DEVICE_ERROR);
  CHECK(!stream_record(s)); /* when in doubt, not */
  end();
}

TEST(a_failed_record_takes_its_number_and_nothing_else)
{
  begin();
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
  end();
}

TEST(a_host_wait_completes_the_record)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *record = stream_record(s);
  CHECK_OK(stream_wait_host(record));
  CHECK(stream_completed(s.stream, 1));
  record_drop(record);
  record = stream_record(s);
  sim_fail_call(w.s, SIM_CALL_event_synchronize, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(stream_wait_host(record), ESPER_DEVICE_ERROR);
  CHECK(!stream_completed(s.stream, 2));
  record_drop(record);
  end();
}

TEST(events_are_pooled)
{
  begin();
  void *a = event_take(device), *b = event_take(device);
  CHECK(a != b);
  event_give(device, a);
  CHECK(event_take(device) == a);
  CHECK_EQ(device->events_created, 2);
  sim_fail_call(w.s, SIM_CALL_event_create, 1, ESPER_OUT_OF_MEMORY);
  CHECK(!event_take(device));
  CHECK(strstr(esper_last_error(), "event_create"));
  CHECK_EQ(device->events_alive, 2);
  event_give(device, a);
  event_give(device, b);
  end();
}
