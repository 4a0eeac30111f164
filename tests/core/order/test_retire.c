/* Finding out which events have completed: by asking, and by probes. */
#include "core/order/retire.h"

#include "core/order/host_wait.h"
#include "streams_world.h"

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

TEST(a_later_number_stands_for_the_earlier_ones_and_for_no_later_one)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *r[5];
  for (int i = 0; i < 5; i++)
    r[i] = stream_record(s);
  CHECK_OK(record_wait(r[2]));
  CHECK_EQ(s.stream->completed, 3);
  CHECK_EQ(s.stream->outstanding, 2);
  CHECK(!r[0]->event && !r[2]->event && r[3]->event);
  CHECK(stream_is_valid(s.stream));
  for (int i = 0; i < 5; i++)
    record_drop(r[i]);
  end();
}

/* The epoch tells heaps that their pending blocks are worth another look. */
TEST(what_has_completed_is_news_once)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *record = stream_record(s);
  uint64_t epoch = w.core->epoch;
  stream_retire(s.stream);
  CHECK_EQ(w.core->epoch, epoch);
  sim_run_all(w.s);
  stream_retire(s.stream);
  CHECK_EQ(w.core->epoch, epoch + 1);
  uint64_t asked = queries();
  stream_retire(s.stream);
  CHECK_OK(record_wait(record));
  CHECK_EQ(w.core->epoch, epoch + 1);
  CHECK_EQ(s.stream->completed, 1);
  CHECK_EQ(queries(), asked);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_event_synchronize), 0);
  record_drop(record);
  end();
}

/* Its event serves another record meanwhile. */
TEST(an_event_is_retired_once)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *first = stream_record(s);
  void *event = first->event;
  sim_run_all(w.s);
  stream_retire(s.stream);
  record_t *second = stream_record(s);
  CHECK(second->event == event && !first->event);
  CHECK_OK(record_wait(first)); /* says nothing of the second */
  record_drop(first);
  stream_retire(s.stream);
  CHECK(second->event == event);
  CHECK(!stream_completed(s.stream, 2));
  CHECK(stream_is_valid(s.stream));
  record_drop(second);
  end();
}

TEST(a_synchronisation_completes_what_was_enqueued_before_it)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *before = stream_record(s);
  stream_sync_begin(s.stream);
  record_t *meanwhile = stream_record(s);
  CHECK_EQ(meanwhile->number, 3); /* the synchronisation has a number of its own */
  stream_sync_done(s.stream);
  CHECK_EQ(s.stream->completed, 2);
  CHECK(!before->event && meanwhile->event);
  CHECK(stream_is_valid(s.stream));
  record_drop(before);
  record_drop(meanwhile);
  end();
}

static void run_after_a_moment(void *stream, sim_call call, int index, void *object)
{
  (void)call, (void)index, (void)object;
  if (queries() == 20)
    world_run(&w, *(esper_stream *)stream);
}

TEST(an_idle_stream_has_a_moment_for_its_event)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *record = stream_record(s);
  sim_before_call(w.s, SIM_CALL_event_query, run_after_a_moment, &w.stream[0]);
  CHECK(stream_completes_now(s.stream, 1));
  sim_before_call(w.s, SIM_CALL_event_query, NULL, NULL);
  uint64_t asked = queries();
  CHECK(stream_completes_now(s.stream, 1)); /* that is known */
  CHECK_EQ(queries(), asked);
  record_drop(record);
  end();
}

TEST(a_busy_stream_is_not_asked_for_ever)
{
  begin();
  presented_t s = present(w.stream[0]);
  record_t *record = stream_record(s);
  CHECK(!stream_completes_now(s.stream, 1));
  CHECK(queries() > 0 && queries() <= 1000);
  record_drop(record);
  end();
}

/* ---- probes ------------------------------------------------------------- */

static uint64_t records(void)
{
  return sim_calls(w.s, SIM_CALL_event_record);
}

TEST(of_several_positions_the_latest_is_asked_about)
{
  begin();
  stream_t *a = present(w.stream[0]).stream, *b = present(w.stream[1]).stream;
  probes_t probes;
  probes.count = 0;
  probes_add(&probes, a, 3);
  probes_add(&probes, b, 1);
  probes_add(&probes, a, 7);
  probes_add(&probes, a, 5);
  CHECK_EQ(probes.count, 2);
  CHECK(probes.stream[0] == a && probes.stream[1] == b);
  CHECK_EQ(probes.stamp[0], 7);
  CHECK_EQ(probes.stamp[1], 1);
  end();
}

/* A record that is late enough serves again. */
TEST(a_probe_records_one_event_for_each_stream)
{
  begin();
  presented_t a = present(w.stream[0]), b = present(w.stream[1]);
  probes_t probes;
  probes.count = 0;
  probes_add(&probes, a.stream, stream_stamp(a.stream));
  probes_add(&probes, b.stream, stream_stamp(b.stream));
  probes_ask(&probes, w.core, false);
  CHECK_EQ(records(), 2);
  CHECK(!stream_completed(a.stream, 1) && !stream_completed(b.stream, 1));
  sim_run_all(w.s);
  probes_ask(&probes, w.core, false);
  CHECK_EQ(records(), 2);
  CHECK(stream_completed(a.stream, 1) && stream_completed(b.stream, 1));
  end();
}

TEST(more_than_so_many_streams_are_not_probed)
{
  begin();
  stream_t *streams[PROBES + 2];
  probes_t probes;
  probes.count = 0;
  for (int i = 0; i < PROBES + 2; i++) {
    streams[i] = present(world_stream(&w, 0)).stream;
    probes_add(&probes, streams[i], 1);
  }
  CHECK_EQ(probes.count, PROBES);
  probes_add(&probes, streams[PROBES - 1], 9); /* that one is among them */
  CHECK_EQ(probes.stamp[PROBES - 1], 9);
  probes.stamp[PROBES - 1] = 1;
  probes_ask(&probes, w.core, false);
  CHECK_EQ(records(), PROBES);
  CHECK_EQ(streams[PROBES - 1]->last, 1);
  CHECK_EQ(streams[PROBES]->last + streams[PROBES + 1]->last, 0);
  end();
}

/* The first question of all comes too early. */
TEST(only_a_patient_probe_gives_an_event_the_moment_that_it_takes)
{
  for (int patient = 0; patient < 2; patient++) {
    begin();
    presented_t s = present(w.stream[0]);
    probes_t probes;
    probes.count = 0;
    probes_add(&probes, s.stream, 1);
    sim_before_call(w.s, SIM_CALL_event_query, run_after_a_moment, &w.stream[0]);
    probes_ask(&probes, w.core, patient);
    sim_before_call(w.s, SIM_CALL_event_query, NULL, NULL);
    CHECK_EQ(stream_completed(s.stream, 1), patient);
    end();
  }
}

/* The handle of a mortal stream is not at hand, and the driver may refuse. */
TEST(a_stream_that_cannot_be_probed_is_passed_over)
{
  begin();
  presented_t mortal = present(world_mortal(&w, 0)), a = present(w.stream[0]),
              b = present(w.stream[1]);
  probes_t probes;
  probes.count = 0;
  probes_add(&probes, mortal.stream, 1);
  probes_add(&probes, a.stream, 1);
  probes_add(&probes, b.stream, 1);
  sim_fail_call(w.s, SIM_CALL_event_record, 1, ESPER_DEVICE_ERROR);
  probes_ask(&probes, w.core, true);
  CHECK_EQ(mortal.stream->last, 0);
  CHECK(!a.stream->oldest && b.stream->oldest);
  end();
}
