/* Marks: when they end, what graphs read, and what happens when memory runs out. */
#include "core/requests/record_use.h"

#include "core/blocks/block.h"
#include "one_world.h"

static void use_until_event(void *ptr, esper_stream reader)
{
  void *event = sim_event_create(w.s, 0);
  CHECK_OK(sim_event_record(w.s, 0, event, reader.handle));
  const void *marked = ptr;
  CHECK_OK(esper_record_use_event(w.core, &marked, 1, event, 0, NULL));
  sim_event_destroy(w.s, 0, event);
}

/* An event that cannot be asked about is on nobody knows which stream: what the
 * carrier records later says nothing of it. */
SCENE_WITH(a_later_event_does_not_cover_one_that_could_not_be_had, begin_of(12 + 14 + 14))
{
  void *x = world_malloc(&w, 12 * MIB, r), *y = world_malloc(&w, 14 * MIB, r);
  sim_wait_flag(w.s, 0, s.handle, 0);
  world_read_on(&w, s, x, r);
  sim_fail_call(w.s, SIM_CALL_event_query, 1, ESPER_DEVICE_ERROR);
  use_until_event(x, s);
  world_free(&w, x);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  use_until_event(y, t);
  world_free(&w, y);
  sim_run_all(w.s); /* all but the read of x */
  CHECK_EQ(world_counters(&w, 0).bytes_pending, 12 * MIB);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  sim_raise_flag_now(w.s, 0);
}

/* Another thread, while one waits for the device. */
static void mark_block(void *x)
{
  use_until_event(x, w.stream[1]);
}
SIM_HOOK(mark_meanwhile)
{
  void **block = context;
  void *x = *block;
  *block = NULL;
  if (x)
    check_on_another_thread(mark_block, x);
}

SCENE_WITH(who_waits_for_the_device_keeps_nobody_from_marking, begin_of(64))
{
  void *x = block(12 * MIB, w.stream[0]);
  sim_before_call(w.s, SIM_CALL_event_wait, mark_meanwhile, &x);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_before_call(w.s, SIM_CALL_event_wait, NULL, NULL);
  CHECK(!x);
  CHECK_EQ(world_counters(&w, 0).uses_pending, 1);
}

/* Another thread frees it after it was found, and empty_cache returns its metadata. */
SCENE_WITH(a_block_that_has_gone_since_it_was_found_is_skipped, begin_of(64))
{
  presented_t reader;
  block_t gone = {0};
  size_t found = 1;
  CHECK_OK(stream_present(w.core, w.stream[1], &reader));
  CHECK_OK(mark_found_block(&gone, &w, reader, &found));
  CHECK_EQ(found, 0);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_event_record), 0);
}

/* Nobody would protect the block, so the caller hears of it. */
SCENE_WITH(a_mark_without_host_memory_is_an_error, begin_of(64))
{
  enum { MOST = 8192 };
  static const void *p[MOST];
  p[0] = world_malloc(&w, 512, w.stream[0]);
  CHECK_OK(esper_record_use(w.core, p, 1, w.stream[1], 0, NULL));
  size_t many = w.core->devices[0].uses.pieces; /* what the core got memory for at once */
  CHECK(many < MOST);
  for (size_t i = 1; i <= many; i++)
    p[i] = world_malloc(&w, 512, w.stream[0]);
  CHECK_OK(esper_record_use(w.core, p + 1, many - 1, w.stream[1], 0, NULL));
  sim_fail_call(w.s, SIM_CALL_event_record, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(WITH_MALLOCS(0, esper_record_use(w.core, p + many, 1, w.stream[1], 0, NULL)),
               ESPER_HOST_MEMORY);
  CHECK_STATUS(WITH_MALLOCS(0, esper_record_stream(w.core, p[many], w.stream[1])),
               ESPER_HOST_MEMORY);
  CHECK_OK(esper_record_use(w.core, p + many, 1, w.stream[1], 0, NULL));
  CHECK_EQ(world_counters(&w, 0).uses_pending, many + 1);
}

/* ---- marks until the free ---------------------------------------------------- */

SCENE_WITH(marks_are_counted_by_when_they_end, begin_of(64))
{
  const void *x[2] = {world_malloc(&w, 12 * MIB, r), world_malloc(&w, 14 * MIB, r)};
  world_use(&w, x[0], s, 0);
  world_use(&w, x[0], s, 0); /* replaces the earlier one */
  CHECK_OK(esper_record_use(w.core, x, 2, w.stream[2], 0, NULL));
  CHECK_OK(esper_record_use(w.core, x, 2, r, 0, NULL));
  use_until_event((void *)x[0], s);
  CHECK_EQ(world_counters(&w, 0).marks_exact, 5);
  CHECK_EQ(world_counters(&w, 0).marks_until_free, 0);
  world_use(&w, x[1], s, ESPER_USE_UNTIL_FREE);
  world_use(&w, x[1], s, ESPER_USE_UNTIL_FREE);
  CHECK_OK(esper_free_after_all(w.core, (void *)x[1]));
  world_record_stream(&w, x[1], s);
  CHECK_EQ(world_counters(&w, 0).marks_exact, 5);
  CHECK_EQ(world_counters(&w, 0).marks_until_free, 4);
}

/* ---- marks by a handle alone ----------------------------------------------- */

/* Whether that was enough. */
static bool mark_it_by_handle(const void *p, void *handle)
{
  esper_status status = ESPER_OK;
  bool enough = mark_by_handle(w.core, p, handle, &status);
  CHECK_OK(status);
  return enough;
}

SCENE_WITH(a_known_streams_handle_is_enough, begin_of(64))
{
  esper_stream mortal = world_mortal(&w, 0);
  char *x = world_malloc(&w, 12 * MIB, r);
  CHECK(!mark_it_by_handle(x, s.handle)); /* never presented */
  CHECK(!mark_it_by_handle(x, mortal.handle));
  CHECK(mark_it_by_handle(&w, r.handle)); /* nobody's block: nothing to do */
  CHECK_EQ(calls(SIM_CALL_event_record), 0);
  world_use(&w, x, s, 0);
  world_use(&w, x, mortal, 0);
  CHECK(mark_it_by_handle(x, s.handle));
  CHECK(mark_it_by_handle(x, mortal.handle));
  CHECK(mark_it_by_handle(x + 512, s.handle));
  CHECK_EQ(calls(SIM_CALL_event_record), 5);
  CHECK(mark_it_by_handle(x, r.handle)); /* its own stream */
  CHECK_EQ(calls(SIM_CALL_event_record), 5);
  CHECK_EQ(world_counters(&w, 0).uses_pending, 2);
}

SCENE_WITH(a_handle_that_came_back_is_not_taken_for_the_old_stream, begin_of(64))
{
  esper_stream mortal = world_mortal(&w, 0);
  void *x = block(12 * MIB, r);
  world_read_marked(&w, mortal, x, r);
  world_destroy_stream(&w, mortal);
  esper_stream other = world_mortal(&w, 0);
  CHECK(other.handle == mortal.handle);
  CHECK(!mark_it_by_handle(x, other.handle));
  world_read_marked(&w, other, x, r);
  CHECK(mark_it_by_handle(x, other.handle));
  CHECK_EQ(world_counters(&w, 0).uses_pending, 2); /* two streams */
  world_free(&w, x);
  sim_run_all(w.s);
  CHECK(world_malloc(&w, 12 * MIB, r) == x);
}

SCENE_WITH(a_handle_of_another_device_and_of_a_captured_stream,
           begin_on((sim_options){WHEN_TOLD, .devices = 2}, NULL))
{
  esper_stream far = world_mortal(&w, 1);
  void *x = world_malloc(&w, 12 * MIB, r);
  world_use(&w, x, far, 0);
  CHECK(mark_it_by_handle(x, far.handle));
  CHECK_EQ(world_counters(&w, 1).events_alive, 2);
  CHECK_EQ(world_counters(&w, 0).events_alive, 0);
  sim_capture_begin(w.s, 1, far.handle);
  CHECK(!mark_it_by_handle(x, far.handle));
  CHECK(sim_capture_is_valid(w.s, 1, far.handle));
  sim_capture_abort(w.s, 1, far.handle);
}

/* ---- what graphs read ------------------------------------------------------- */

static void note_warning(void *context, const char *text)
{
  CHECK(strstr(text, "a CUDA graph reads"));
  ++*(int *)context;
}

TEST(marks_of_memory_from_outside_are_counted_and_held)
{
  int warnings = 0;
  esper_config config = {.warn = note_warning, .warn_context = &warnings};
  begin_on((sim_options){WHEN_TOLD}, &config);
  void *x = block(12 * MIB, s);
  sim_run_all(w.s);
  esper_retire(w.core, 0);
  sim_capture_begin(w.s, 0, r.handle);
  sim_kernel(w.s, 0, r.handle, x, 512, SIM_READ);
  world_use(&w, x, r, 0);
  CHECK_EQ(world_counters(&w, 0).captured_uses, 1);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  world_free(&w, x);
  CHECK(world_malloc(&w, 12 * MIB, s) != x);
  sim_graph_destroy(w.s, graph);
  CHECK_EQ(world_counters(&w, 0).captured_frees, 1);
  CHECK_EQ(warnings, 1);
  for (int i = 0; i < 2; i++) { /* said once */
    x = world_malloc(&w, 512, s);
    sim_capture_begin(w.s, 0, r.handle);
    if (i)
      world_record_stream(&w, x, r);
    else
      world_use(&w, x, r, 0);
    sim_capture_abort(w.s, 0, r.handle);
    world_free(&w, x);
  }
  CHECK_EQ(world_counters(&w, 0).captured_frees, 3);
  CHECK_EQ(warnings, 1);
  world_end(&w);
}

/* A graph captured on s reads x, and is replayed on t. Nothing on s says when that is over. */
typedef enum {
  NOTHING,
  A_MALLOC,
  A_MARK,
  A_RECORD_STREAM,
  A_RECORD_STREAM_INSIDE,
  UNTIL_FREE_INSIDE
} on_s;

static void replay_elsewhere(on_s what)
{
  begin_of(1024);
  void *x = block(3 * MIB, r), *other = world_malloc(&w, 512, r);
  if (what == A_RECORD_STREAM)
    world_record_stream(&w, x, s);
  sim_capture_begin(w.s, 0, s.handle);
  sim_kernel(w.s, 0, s.handle, x, 3 * MIB, SIM_READ);
  if (what == A_RECORD_STREAM_INSIDE)
    world_record_stream(&w, x, s);
  else
    world_use(&w, x, s, what == UNTIL_FREE_INSIDE ? ESPER_USE_UNTIL_FREE : 0u);
  CHECK_EQ(world_counters(&w, 0).captured_uses, 1);
  sim_graph *graph = sim_capture_end(w.s, 0, s.handle);
  world_wait(&w, t, r);
  sim_graph_launch(w.s, graph, 0, t.handle);
  sim_graph_destroy(w.s, graph);
  world_free(&w, x);
  if (what == A_MALLOC)
    world_malloc(&w, 512, s);
  if (what == A_MARK)
    world_use(&w, other, s, 0);
  world_run(&w, s);
  esper_retire(w.core, 0);
  CHECK(world_malloc(&w, 3 * MIB, r) != x);
  CHECK_OK(sim_device_synchronize(w.s, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
  world_end(&w);
}

TEST(what_a_graph_reads_is_held_wherever_the_graph_is_replayed)
{
  replay_elsewhere(NOTHING);
  replay_elsewhere(A_MALLOC);
  replay_elsewhere(A_MARK);
  replay_elsewhere(A_RECORD_STREAM);
  replay_elsewhere(A_RECORD_STREAM_INSIDE);
  replay_elsewhere(UNTIL_FREE_INSIDE);
}
