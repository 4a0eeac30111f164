/* Whether a stream, or some stream of a device, is being captured. */
#include "core/order/capturing.h"

#include "captures_world.h"

/* ---- one stream ------------------------------------------------------------ */

/* A call asks once, and goes on with that answer. */
SCENE(what_the_driver_was_asked_already_is_not_asked_again)
{
  uint64_t capture = capture_begin();
  presented_t p = present(r); /* not met before, so the driver was asked */
  CHECK(p.asked);
  uint64_t before = calls(SIM_CALL_stream_capture);
  CHECK_EQ(stream_capture_of(p, true), capture);
  sim_capture_abort(w.s, 0, r.handle);
  CHECK_EQ(stream_capture_of(p, true), capture);
  CHECK_EQ(calls(SIM_CALL_stream_capture), before);
}

/* The question can disturb the capture of another stream. */
SCENE(the_legacy_stream_is_asked_about_only_before_recording)
{
  presented_t legacy = present((esper_stream){0}),
              all = {.stream = legacy.stream->device->all_streams};
  uint64_t before = calls(SIM_CALL_stream_capture);
  CHECK_EQ(stream_capture_of(legacy, false), 0);
  CHECK_EQ(stream_capture_of(all, true), 0); /* no stream of the driver */
  CHECK_EQ(calls(SIM_CALL_stream_capture), before);
  CHECK_EQ(stream_capture_of(legacy, true), 0);
  CHECK_EQ(calls(SIM_CALL_stream_capture), before + 1);
}

/* ---- some stream of a device ------------------------------------------------- */

static int is_handle(void *context, void *stream)
{
  return stream == context;
}

/* x was read by a graph, and is freed inside the next capture before that allocates. */
static void free_first_inside(bool record_stream, bool announced)
{
  begin_with(&(esper_config){.captures_are_announced = announced}, 0);
  void *x = block(2 * MIB, s);
  capture_begin();
  sim_kernel(w.s, 0, r.handle, x, 512, SIM_READ);
  if (record_stream)
    world_record_stream(&w, x, r);
  else
    world_use(&w, x, r, 0);
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, r.handle));
  esper_stream u = w.stream[4]; /* the core has not met it */
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, is_handle, u.handle));
  if (announced)
    CHECK_OK(esper_capture_begin(w.core, 0));
  sim_capture_begin(w.s, 0, u.handle);
  world_free(&w, x);
  if (announced)
    CHECK_STATUS(esper_empty_cache(w.core, 0, NULL), ESPER_OK);
  sim_kernel(w.s, 0, u.handle, NULL, 0, SIM_READ);
  sim_graph *graph = captured(u);
  sim_graph_destroy(w.s, graph);
  if (announced)
    CHECK_OK(esper_capture_end(w.core, 0));
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
  sim_run_all(w.s);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
  end();
}

TEST(what_a_graph_reads_ends_no_capture_when_it_is_freed)
{
  for (int i = 0; i < 4; i++)
    free_first_inside(i & 1, i & 2);
}
