/* Uses without an event: they hold their blocks until their stream presents itself or the device
 * was synchronised. And how a device is waited for. */
#include "core/requests/drain.h"

#include "core/base/monotonic.h"
#include "core/base/core.h"
#include "core/order/device.h"
#include "one_world.h"

/* The clock stands still, so that nothing depends on how busy the machine is. */
__attribute__((constructor)) static void stop_the_clock(void)
{
  monotonic_skip(0);
}

/* Another thread: reads a block on the mortal stream, and frees it. */
static struct {
  void *block;
  esper_stream reader, owner;
} meanwhile;

SIM_HOOK(read_meanwhile)
{
  if (!meanwhile.block || object != meanwhile.reader.handle)
    return;
  void *block = meanwhile.block;
  meanwhile.block = NULL;
  world_read_on(&w, meanwhile.reader, block, meanwhile.owner);
  world_free(&w, block);
}

SCENE_WITH(an_event_from_before_the_free_does_not_cover_a_held_use, begin_of(12 + 14 + 2))
{
  esper_stream mortal = world_mortal(&w, 0);
  void *x = world_malloc(&w, 12 * MIB, r), *y = world_malloc(&w, 14 * MIB, r);
  world_record_stream(&w, x, mortal);
  world_record_stream(&w, y, mortal);
  world_read_on(&w, mortal, x, r);
  world_free(&w, x); /* held: the stream's handle is not at hand */
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  meanwhile.block = y;
  meanwhile.reader = mortal;
  meanwhile.owner = r;
  sim_after_call(w.s, SIM_CALL_event_record, read_meanwhile, NULL);
  world_malloc(&w, 512, mortal); /* an event, then y is read and freed */
  sim_after_call(w.s, SIM_CALL_event_record, NULL, NULL);
  CHECK(!meanwhile.block);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  CHECK(world_malloc(&w, 12 * MIB, r) == x);
  CHECK(world_malloc(&w, 14 * MIB, r) == y);
}

/* What the stream did since can be recorded when it presents itself once more. */
SCENE_WITH(a_held_use_whose_event_the_driver_refused_is_recorded_next_time, begin_of(12 + 2))
{
  esper_stream mortal = world_mortal(&w, 0);
  void *x = world_malloc(&w, 12 * MIB, r);
  world_record_stream(&w, x, mortal);
  world_free(&w, x);
  sim_fail_call(w.s, SIM_CALL_event_record, 1, ESPER_DEVICE_ERROR);
  world_malloc(&w, 512, mortal);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  world_malloc(&w, 512, mortal);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
}

static void begin_with_two_devices(void)
{
  begin_on((sim_options){WHEN_TOLD, .devices = 2, .capacity = 12 * MIB}, NULL);
}

/* That device is at work on what waits for r: better no memory than no end. */
SCENE_WITH(the_host_does_not_wait_for_ever_for_another_device, begin_with_two_devices())
{
  esper_stream far = world_mortal(&w, 1);
  esper_stream spinning = world_stream(&w, 1);
  sim_wait_flag(w.s, 1, spinning.handle, 0);
  void *x = world_malloc(&w, 12 * MIB, r);
  world_record_stream(&w, x, far);
  world_read_on(&w, far, x, r);
  world_free(&w, x);
  CHECK_STATUS(try_malloc(12 * MIB, r), ESPER_OUT_OF_MEMORY);
  sim_raise_flag(w.s, 0, r.handle, 0);
  sim_run_all(w.s);
  CHECK_EQ(sim_pending_all(w.s), 0);
  monotonic_skip(60 * 1000000);
  CHECK(world_malloc(&w, 12 * MIB, r) == x);
}

/* Which stream replays are on is not known: any of that device. That its own device was waited for
 * says nothing of them; device 1 is waited for in vain while something spins there. */
SCENE_WITH(a_pool_that_is_gone_keeps_what_graphs_read_on_another_device, begin_with_two_devices())
{
  esper_stream far = world_stream(&w, 1), farther = world_stream(&w, 1);
  esper_stream on = world_stream(&w, 1);
  CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, world_any_stream, NULL));
  sim_capture_begin(w.s, 0, r.handle);
  void *x = world_malloc(&w, 12 * MIB, r);
  world_read_marked(&w, far, x, r);
  read_and_free(x, farther);
  world_wait(&w, r, far);
  world_wait(&w, r, farther);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
  sim_graph_launch(w.s, graph, 1, on.handle);
  sim_graph_destroy(w.s, graph);
  sim_wait_flag(w.s, 1, world_stream(&w, 1).handle, 0);
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  CHECK_OK(esper_pool_empty(w.core, 0, 1, 0));
  CHECK_EQ(reserved(), 12 * MIB);
  world_check(&w);
  sim_raise_flag(w.s, 0, r.handle, 0);
  sim_run_all(w.s);
  CHECK_EQ(sim_pending_all(w.s), 0);
  monotonic_skip(60 * 1000000);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
}

/* ---- how long ----------------------------------------------------------------- */

/* A capture that nobody announced, on a stream that the core has not met, while a pool is open. */
SCENE_WITH(a_drain_that_cannot_tell_ends_no_capture, begin_of(64))
{
  void *handle = sim_stream_create(w.s, 0);
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, world_any_stream, NULL));
  sim_capture_begin(w.s, 0, handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(sim_capture_is_valid(w.s, 0, handle));
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, handle));
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
}

/* No event stands for all streams then, but a graph of the pool that is gone may be on any. */
SCENE_WITH(while_another_pool_is_open_what_a_pool_left_behind_is_waited_for, begin_of(64))
{
  void *x = world_malloc_from(&w, world_pool(&w, 0, 1, 0), 12 * MIB, r);
  world_free(&w, x);
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, world_any_stream, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
}

/* Memory that was lent is freed while a stream that is not PyTorch's is captured, unannounced.
 * Nothing ends that capture. When the stream shows itself again, memory is lent again. */
SCENE_WITH(no_event_for_all_streams_ends_the_capture_of_a_mortal_stream, begin_of(1024))
{
  esper_stream mortal = world_mortal(&w, 0);
  void *x = world_malloc(&w, 9 * MIB, s);
  world_malloc(&w, 9 * MIB, s);
  world_free(&w, x);
  world_note_all(&w);
  CHECK(world_malloc(&w, 9 * MIB, r) == x);
  sim_capture_begin(w.s, 0, mortal.handle);
  block(5 * MIB, mortal);
  world_free(&w, x);
  CHECK(sim_capture_is_valid(w.s, 0, mortal.handle));
  CHECK_EQ(world_counters(&w, 0).loans, 1);
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, mortal.handle));
  world_malloc(&w, 512, mortal);
  sim_run_all(w.s);
  world_note_all(&w);
  world_malloc(&w, 9 * MIB, w.stream[2]);
  CHECK_EQ(world_counters(&w, 0).loans, 2);
}

static int no_stream(void *context, void *handle)
{
  (void)context, (void)handle;
  return 0;
}

/* Captures are not announced, and a pool may be one's. Memory that everybody has left must
 * serve. */
SCENE_WITH(while_a_pool_is_open_memory_goes_to_other_streams_before_it_runs_out, begin_of(64))
{
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, no_stream, NULL));
  void *x = block(50 * MIB, s);
  world_free(&w, x);
  sim_run_all(w.s);
  world_free(&w, world_malloc(&w, 40 * MIB, r));
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
}

static esper_stream capturing;
static int captures;

SIM_HOOK(begin_a_capture)
{
  if (captures++)
    return;
  sim_capture_begin(w.s, 0, capturing.handle);
  world_malloc(&w, 5 * MIB, capturing);
}

/* The host waits for an event for all streams, and a stream that is not PyTorch's is captured
 * meanwhile. */
SCENE_WITH(a_capture_that_begins_during_a_wait_is_not_forgotten, begin_of(1024))
{
  capturing = world_mortal(&w, 0);
  captures = 0;
  void *x = world_malloc(&w, 9 * MIB, s);
  world_malloc(&w, 9 * MIB, s);
  world_free(&w, x);
  sim_run_all(w.s);
  world_note_all(&w);
  CHECK(world_malloc(&w, 9 * MIB, r) == x);
  world_kernel(&w, r, x);
  sim_before_call(w.s, SIM_CALL_event_wait, begin_a_capture, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_before_call(w.s, SIM_CALL_event_wait, NULL, NULL);
  CHECK(captures);
  world_free(&w, x);
  CHECK(sim_capture_is_valid(w.s, 0, capturing.handle));
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, capturing.handle));
}

/* The stream is gone, and never shows that its capture is over. */
SCENE_WITH(a_capture_of_a_stream_that_is_gone_is_forgotten_when_a_pool_ends, begin_of(1024))
{
  esper_stream mortal = world_mortal(&w, 0);
  sim_capture_begin(w.s, 0, mortal.handle);
  world_malloc(&w, 5 * MIB, mortal);
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, mortal.handle));
  world_destroy_stream(&w, mortal);
  world_free(&w, world_malloc(&w, 9 * MIB, w.stream[0]));
  sim_run_all(w.s);
  world_malloc(&w, 9 * MIB, w.stream[1]);
  CHECK_EQ(world_counters(&w, 0).loans, 0);
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, no_stream, NULL));
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
  world_note_all(&w);
  world_malloc(&w, 9 * MIB, w.stream[2]);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 3);
}

/* The same, and the capture was announced. */
SCENE_WITH(a_capture_of_a_stream_that_is_gone_is_forgotten_at_its_end, begin_of(1024))
{
  esper_stream mortal = world_mortal(&w, 0);
  CHECK_OK(esper_capture_begin(w.core, 0));
  sim_capture_begin(w.s, 0, mortal.handle);
  world_malloc(&w, 5 * MIB, mortal);
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, mortal.handle));
  CHECK_OK(esper_capture_end(w.core, 0));
  world_destroy_stream(&w, mortal);
  for (int i = 0; i < 8; i++) {
    world_free(&w, world_malloc(&w, 9 * MIB, w.stream[i]));
    sim_run_all(w.s);
  }
  CHECK(world_stats(&w, 0).segment[ESPER_ALL].current <= 3);
}

/* The second stream of the other device waits for what this host has yet to enqueue. */
SIM_HOOK(raise_one)
{
  sim_raise_flag_now(w.s, 1);
}

SCENE_WITH(a_device_is_not_waited_for_without_end_for_another_ones_memory,
           begin_on((sim_options){.completion = SIM_WHEN_TOLD, .devices = 2, .capacity = 12 * MIB},
                    NULL))
{
  esper_stream far = world_mortal(&w, 1);
  sim_wait_flag(w.s, 1, world_stream(&w, 1).handle, 0);
  void *x = world_malloc(&w, 12 * MIB, r);
  world_record_stream(&w, x, far);
  world_read_on(&w, far, x, r);
  world_free(&w, x);
  sim_wait_flag(w.s, 0, t.handle, 1); /* this device is late, but ends */
  sim_before_call(w.s, SIM_CALL_event_synchronize, raise_one, NULL);
  CHECK_STATUS(try_malloc(12 * MIB, r), ESPER_OUT_OF_MEMORY);
  sim_before_call(w.s, SIM_CALL_event_synchronize, NULL, NULL);
  sim_raise_flag(w.s, 0, r.handle, 0);
  sim_run_all(w.s);
}

SCENE_WITH(many_stuck_streams_cost_the_time_of_one, begin_of(1024))
{
  for (int i = 2; i < 8; i++) {
    world_malloc(&w, 2 * MIB, w.stream[i]);
    sim_wait_flag(w.s, 0, w.stream[i].handle, 0);
  }
  CHECK_OK(esper_capture_begin(w.core, 0)); /* no event for all streams */
  uint64_t before = calls(SIM_CALL_event_wait);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(calls(SIM_CALL_event_wait) - before <= 100);
  CHECK_OK(esper_capture_end(w.core, 0));
  sim_raise_flag_now(w.s, 0);
}
