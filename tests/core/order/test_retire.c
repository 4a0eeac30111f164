/* Finding out which events have completed: by asking, and by probes. */
#include "core/order/retire.h"

#include "core/order/host_wait.h"
#include "streams_world.h"

/* Of thousands that were there once only the busy ones are asked. */
SCENE(retiring_asks_only_streams_with_outstanding_records)
{
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
}

/* With a thousand events done, far fewer are asked about. */
SCENE(retiring_gallops)
{
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
}

/* ---- probes ------------------------------------------------------------- */

static uint64_t records(void)
{
  return sim_calls(w.s, SIM_CALL_event_record);
}

SCENE(of_several_positions_the_latest_is_asked_about)
{
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
}

/* A record that is late enough serves again. */
SCENE(a_probe_records_one_event_for_each_stream)
{
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
}

SCENE(more_than_so_many_streams_are_not_probed)
{
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
}
