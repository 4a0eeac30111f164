/* What comes before what inside a capture: marks, frees and reuse by nodes of the graph. The core
 * is not told of the captures, as with CuPy. */
#include "core/order/capture.h"

#include "world.h"

static world w;
static esper_stream r, s, t, o;

enum { X = 12, Y = 14 }; /* MiB: each has a segment of its own */

static void begin_with(const esper_config *config, size_t capacity)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                         .completion = SIM_WHEN_TOLD,
                         .capacity = capacity};
  world_begin_with(&w, &options, config);
  r = w.stream[0];
  s = w.stream[1];
  t = w.stream[2];
  o = w.stream[3];
}

static void begin(void)
{
  begin_with(NULL, 0);
}

static void end(void)
{
  CHECK(capture_is_valid(w.core));
  world_end(&w);
}

static uint64_t capture_begin(void)
{
  return sim_capture_begin(w.s, 0, r.handle);
}

/* Ends it, replays the graph twice, and throws it away. */
static void capture_end(void)
{
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  sim_graph_launch(w.s, graph, 0, o.handle);
  sim_graph_launch(w.s, graph, 0, o.handle);
  sim_run_all(w.s);
  sim_graph_destroy(w.s, graph);
}

static void *block(size_t mib, esper_stream stream)
{
  void *p = world_malloc(&w, mib * MIB, stream);
  world_kernel(&w, stream, p);
  return p;
}

static uint64_t gates(void)
{
  return world_counters(&w, 0).gates_issued;
}

/* The reader goes on with other work, so r must not wait for all of it. */
TEST(a_mark_inside_lets_memory_be_reused_inside)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  void *y = block(Y, s);
  world_free(&w, x);
  CHECK(block(X, r) == x);
  CHECK_EQ(gates(), 1);
  world_free(&w, x);
  CHECK(block(X, r) == x); /* r comes after itself */
  CHECK_EQ(gates(), 1);
  world_wait(&w, r, s);
  world_free(&w, y);
  capture_end();
  CHECK_EQ(world_counters(&w, 0).captured_uses, 0);
  end();
}

TEST(what_the_program_ordered_itself_needs_no_edge)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  world_wait(&w, r, s);
  for (int i = 0; i < 20; i++)
    sim_kernel(w.s, 0, r.handle, NULL, 0, SIM_READ);
  CHECK(block(X, r) == x);
  CHECK_EQ(gates(), 0);
  capture_end();
  end();
}

/* An edge that was added for one block serves another that was read before it. */
TEST(edges_that_were_spared_are_counted)
{
  begin();
  capture_begin();
  void *x = block(X, r), *y = block(Y, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_read_on(&w, s, y, r);
  world_use(&w, y, s, 0);
  world_free(&w, x);
  world_free(&w, y);
  CHECK_EQ(world_counters(&w, 0).gates_skipped, 0);
  CHECK(block(Y, r) == y);
  CHECK_EQ(gates(), 1);
  CHECK(block(X, r) == x);
  CHECK_EQ(gates(), 1);
  CHECK_EQ(world_counters(&w, 0).gates_skipped, 1);
  world_wait(&w, r, s);
  capture_end();
  end();
}

/* Of two reads the program has ordered one. */
TEST(an_edge_that_was_spared_beside_one_that_was_not_is_counted)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_read_on(&w, t, x, r);
  world_use(&w, x, t, 0);
  world_wait(&w, r, s);
  world_free(&w, x);
  CHECK(block(X, r) == x);
  CHECK_EQ(gates(), 1);
  CHECK_EQ(world_counters(&w, 0).gates_skipped, 1);
  world_wait(&w, r, t);
  capture_end();
  end();
}

TEST(a_mark_without_gate_is_not_depended_on)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, ESPER_USE_NO_GATE);
  world_free(&w, x);
  CHECK(block(X, r) != x);
  world_wait(&w, r, s);
  CHECK(block(X, r) == x);
  capture_end();
  end();
}

TEST(reuse_order_grow_takes_more_memory_inside_too)
{
  esper_config config = {.reuse_order = ESPER_REUSE_GROW};
  begin_with(&config, 0);
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  CHECK(block(X, r) != x);
  CHECK_EQ(gates(), 0);
  world_wait(&w, r, s);
  capture_end();
  end();
}

TEST(record_stream_inside_ends_with_the_free)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_record_stream(&w, x, s);
  world_read_on(&w, s, x, r);
  world_free(&w, x);
  CHECK(block(X, r) != x); /* no gate while memory can grow */
  world_wait(&w, r, s);
  CHECK(block(X, r) == x);
  capture_end();
  end();
}

/* The one use as the core tells of it. */
static esper_use_entry only_use(void)
{
  esper_snapshot snapshot;
  CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
  CHECK_EQ(snapshot.use_count, 1);
  esper_use_entry use = snapshot.uses[0];
  esper_snapshot_free(&snapshot);
  return use;
}

TEST(a_use_inside_is_shown_as_one_and_holds_nothing)
{
  begin();
  void *outside = block(Y, r);
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  esper_use_entry use = only_use();
  CHECK(use.stream == s.handle && use.number == 0);
  CHECK_EQ(use.kind, ESPER_ENTRY_CAPTURED);
  world_free(&w, x);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
  CHECK_EQ(world_counters(&w, 0).bytes_pending, X * MIB);
  CHECK(block(X, r) == x);
  world_use(&w, outside, s, 0); /* of memory that is not the capture's */
  CHECK_EQ(only_use().kind, ESPER_ENTRY_HELD);
  world_wait(&w, r, s);
  world_free(&w, outside);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  capture_end();
  end();
}

/* Native needs an option for this: memory freed on a joined stream. */
TEST(a_joined_streams_memory_serves_the_others)
{
  begin();
  capture_begin();
  world_wait(&w, s, r);
  void *x = block(X, s), *y = block(Y, s);
  world_free(&w, x);
  CHECK(block(X, r) != x); /* not joined yet */
  world_wait(&w, r, s);
  world_free(&w, y);
  for (int i = 0; i < 20; i++)
    sim_kernel(w.s, 0, r.handle, NULL, 0, SIM_READ);
  CHECK(block(X, r) == x);
  CHECK(block(Y, r) == y); /* freed after the join: at the same place */
  world_free(&w, x);
  world_free(&w, y);
  CHECK(block(X, r) == x);
  CHECK_EQ(gates(), 0);
  capture_end();
  end();
}

/* s takes a part of what r freed; t may take the rest, and the part again, only
 * after both. */
TEST(a_loan_inside_is_a_use)
{
  begin();
  capture_begin();
  void *x = block(9, r), *y = block(9, r); /* of one segment */
  world_wait(&w, t, r);
  world_free(&w, x);
  world_wait(&w, s, r);
  CHECK(block(9, s) == x);
  CHECK_EQ(world_counters(&w, 0).loans, 1);
  world_free(&w, x);
  CHECK(block(9, r) != x);
  CHECK(block(9, t) != x);
  world_wait(&w, t, s);
  CHECK(block(9, t) == x);
  world_free(&w, y);
  world_wait(&w, r, t);
  world_wait(&w, r, s);
  capture_end();
  end();
}

TEST(a_merged_block_inside_owes_what_both_owed)
{
  begin();
  capture_begin();
  void *a = block(9, r), *b = block(9, r);
  world_read_on(&w, s, a, r);
  world_use(&w, a, s, 0);
  world_read_on(&w, t, b, r);
  world_use(&w, b, t, 0);
  world_free(&w, a);
  world_free(&w, b);
  world_wait(&w, r, s);
  world_wait(&w, r, t);
  world_wait(&w, o, s);
  sim_kernel(w.s, 0, o.handle, NULL, 0, SIM_READ);
  void *c = block(X, r); /* r learns that it comes after s and t, and merges */
  CHECK(c == a || c == b || (char *)c > (char *)a);
  world_free(&w, c);
  CHECK(block(16, o) != a); /* o comes after s, not after t */
  world_wait(&w, o, r);
  CHECK(block(18, o) == a);
  world_wait(&w, r, o);
  capture_end();
  end();
}

TEST(memory_that_ran_out_inside_is_waited_for_in_the_graph)
{
  begin_with(NULL, 32 * MIB);
  capture_begin();
  world_wait(&w, s, r);
  void *x = block(X, s), *y = block(X, r);
  world_record_stream(&w, y, s);
  world_free(&w, x);
  world_free(&w, y);
  CHECK(block(X, r) == y);
  CHECK(block(X, r) == x);
  CHECK_EQ(gates(), 1); /* s comes before once and for all */
  world_wait(&w, r, s);
  capture_end();
  end();
}

/* ---- the border ------------------------------------------------------------- */

TEST(a_use_outside_cannot_become_an_edge)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  sim_kernel(w.s, 0, o.handle, x, 512, SIM_READ);
  world_use(&w, x, o, 0); /* o is not in the capture */
  world_free(&w, x);
  sim_run_all(w.s);
  esper_retire(w.core, 0);
  CHECK(block(X, r) != x);
  capture_end();
  end();
}

static void note_warning(void *context, const char *text)
{
  CHECK(strstr(text, "a CUDA graph reads"));
  ++*(int *)context;
}

TEST(marks_of_memory_from_outside_are_counted_and_held)
{
  int warnings = 0;
  esper_config config = {.warn = note_warning, .warn_context = &warnings};
  begin_with(&config, 0);
  void *x = block(X, s);
  sim_run_all(w.s);
  esper_retire(w.core, 0);
  capture_begin();
  sim_kernel(w.s, 0, r.handle, x, 512, SIM_READ);
  world_use(&w, x, r, 0);
  CHECK_EQ(world_counters(&w, 0).captured_uses, 1);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, s) != x);
  sim_graph_destroy(w.s, graph);
  CHECK_EQ(world_counters(&w, 0).captured_frees, 1);
  CHECK_EQ(warnings, 1);
  for (int i = 0; i < 2; i++) { /* said once */
    x = world_malloc(&w, 512, s);
    capture_begin();
    if (i)
      world_record_stream(&w, x, r);
    else
      world_use(&w, x, r, 0);
    sim_capture_abort(w.s, 0, r.handle);
    world_free(&w, x);
  }
  CHECK_EQ(world_counters(&w, 0).captured_frees, 3);
  CHECK_EQ(warnings, 1);
  end();
}

/* A graph captured on s reads x, and is replayed on t. Nothing on s says when that is over. */
typedef enum { NOTHING, A_MALLOC, A_MARK, A_RECORD_STREAM, A_RECORD_STREAM_INSIDE } on_s;

static void replay_elsewhere(on_s what)
{
  begin();
  void *x = world_malloc(&w, 3 * MIB, r), *other = world_malloc(&w, 512, r);
  world_kernel(&w, r, x);
  if (what == A_RECORD_STREAM)
    world_record_stream(&w, x, s);
  sim_capture_begin(w.s, 0, s.handle);
  sim_kernel(w.s, 0, s.handle, x, 3 * MIB, SIM_READ);
  if (what == A_RECORD_STREAM_INSIDE)
    world_record_stream(&w, x, s);
  else
    world_use(&w, x, s, 0);
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
}

/* The device can be waited for all the same when no replay is under way. */
TEST(what_a_graph_reads_is_no_stream_that_nobody_may_wait_for)
{
  for (int kept = 0; kept < 3; kept++) {
    sim_options options = {.capacity = 100 * MIB,
                           .oracle = SIM_ORACLE_KNOWN,
                           .completion = SIM_AT_ONCE};
    esper_config config = {.segments = ESPER_SEGMENTS_CLASSIC};
    world_begin_with(&w, &options, &config);
    r = w.stream[0], s = w.stream[1], t = w.stream[2], o = w.stream[3];
    CHECK_OK(esper_stream_set_traits(w.core, o, ESPER_TRAIT_RENDEZVOUS)); /* and is idle */
    void *x = block(2, s);
    capture_begin();
    if (kept == 1)
      world_record_stream(&w, x, r);
    else
      world_use(&w, x, r, kept ? ESPER_USE_NO_GATE : 0);
    sim_graph_destroy(w.s, sim_capture_end(w.s, 0, r.handle));
    if (!kept)
      world_free(&w, x);
    world_free(&w, block(60, t));
    sim_run_all(w.s);
    block(70, s);
    end();
  }
}

/* It may depend on what this thread has still to enqueue. */
TEST(a_replay_under_way_that_bars_gates_is_not_waited_for)
{
  begin_with(&(esper_config){.segments = ESPER_SEGMENTS_CLASSIC}, 100 * MIB);
  void *x = world_malloc(&w, 2 * MIB, s), *p;
  capture_begin();
  sim_kernel(w.s, 0, r.handle, x, 512, SIM_READ);
  world_use(&w, x, r, ESPER_USE_NO_GATE);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  world_free(&w, world_malloc(&w, 60 * MIB, s));
  sim_wait_flag(w.s, 0, o.handle, 0);
  sim_graph_launch(w.s, graph, 0, o.handle);
  sim_graph_destroy(w.s, graph);
  CHECK_STATUS(esper_malloc(w.core, 70 * MIB, t, &p), ESPER_OUT_OF_MEMORY);
  sim_raise_flag_now(w.s, 0);
  sim_run_all(w.s);
  world_malloc(&w, 70 * MIB, t);
  end();
}

static int is_handle(void *context, void *stream)
{
  return stream == context;
}

/* x was read by a graph, and is freed inside the next capture before that allocates. */
static void free_first_inside(bool record_stream, bool announced)
{
  begin_with(&(esper_config){.captures_are_announced = announced}, 0);
  void *x = block(2, s);
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
  sim_graph *graph = sim_capture_end(w.s, 0, u.handle);
  CHECK(graph);
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

/* A graph of device 0's pool reads x on a stream of device 1, and is replayed there by another one.
 * The use has no point in the graph. The pool was begun again in between. */
TEST(what_another_device_reads_is_held_when_a_pool_is_begun_again)
{
  sim_options options = {.devices = 2, .oracle = SIM_ORACLE_KNOWN, .completion = SIM_WHEN_TOLD};
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  esper_stream far = world_stream(&w, 1), on = world_stream(&w, 1);
  world_free(&w, world_malloc(&w, 512, far));
  CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, is_handle, r.handle));
  capture_begin();
  void *x = world_malloc(&w, X * MIB, r);
  world_read_on(&w, far, x, r);
  world_record_stream(&w, x, far);
  sim_fail_calls_from(w.s, SIM_CALL_capture_point, 2, ESPER_DEVICE_ERROR);
  world_free(&w, x);
  sim_fail_calls_from(w.s, SIM_CALL_capture_point, 0, ESPER_OK);
  world_wait(&w, r, far);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
  sim_graph_launch(w.s, graph, 1, on.handle);
  sim_graph_destroy(w.s, graph);
  CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, is_handle, r.handle));
  CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  world_malloc(&w, 512, far); /* it presents itself */
  world_run(&w, far);
  esper_retire(w.core, 1);
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  CHECK_OK(esper_pool_empty(w.core, 0, 1, 0)); /* or the oracle complains */
  sim_run_all(w.s);
  end();
}

TEST(two_captures_at_once_keep_apart)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_free(&w, x);
  sim_capture_begin(w.s, 0, s.handle);
  void *y = block(X, s);
  CHECK(y != x);
  world_free(&w, y);
  CHECK(block(X, s) == y);
  world_free(&w, y);
  CHECK(block(X, r) == x);
  world_free(&w, x); /* freed while the thread's other capture is open */
  sim_graph *other = sim_capture_end(w.s, 0, s.handle);
  CHECK(other);
  sim_graph_launch(w.s, other, 0, t.handle);
  sim_graph_destroy(w.s, other);
  capture_end();
  end();
}

/* A capture that was invalidated runs nothing: its streams get what they may
 * have after it. Its nodes are not touched again. */
TEST(an_invalidated_capture_counts_as_none)
{
  begin();
  void *free_before = block(X, r);
  world_free(&w, free_before);
  capture_begin();
  void *x = block(X, r), *y = block(Y, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  void *event = sim_event_create(w.s, 0);
  CHECK_OK(sim_event_record(w.s, 0, event, o.handle));
  CHECK_STATUS(sim_stream_wait(w.s, 0, r.handle, event), ESPER_CAPTURING);
  sim_event_destroy(w.s, 0, event);
  world_free(&w, x);
  world_use(&w, y, s, 0);
  world_free(&w, y);
  CHECK(world_malloc(&w, X * MIB, r) == free_before);
  CHECK(!sim_capture_end(w.s, 0, r.handle));
  world_kernel(&w, r, free_before);
  world_malloc(&w, X * MIB, r);
  world_malloc(&w, X * MIB, s);
  end();
}

TEST(an_aborted_captures_nodes_are_not_touched)
{
  begin();
  capture_begin();
  void *x = block(X, r), *y = block(Y, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_free(&w, y);
  sim_capture_abort(w.s, 0, r.handle);
  world_free(&w, x);
  capture_begin();
  world_wait(&w, s, r);
  block(X, r);
  block(X, s);
  world_wait(&w, r, s);
  capture_end();
  end();
}

static void abort_capture(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)call, (void)object;
  sim_before_call(w.s, SIM_CALL_capture_before, NULL, NULL);
  sim_capture_abort(w.s, device, r.handle);
}

/* Another thread may do it between any two calls of the driver. */
TEST(a_capture_that_ends_during_the_walk_is_not_walked_on)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  world_wait(&w, r, s);
  sim_kernel(w.s, 0, r.handle, NULL, 0, SIM_READ);
  sim_before_call(w.s, SIM_CALL_capture_before, abort_capture, NULL);
  CHECK(world_malloc(&w, X * MIB, r) != x);
  CHECK(!sim_capture_is_valid(w.s, 0, r.handle));
  end();
}

TEST(a_child_graph_is_a_node)
{
  begin();
  capture_begin();
  void *inner = block(X, r);
  sim_graph *child = sim_capture_end(w.s, 0, r.handle);
  capture_begin();
  void *x = block(X, r);
  world_wait(&w, s, r);
  sim_graph_launch(w.s, child, 0, s.handle);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  CHECK(block(X, r) == x);
  world_wait(&w, r, s);
  capture_end();
  sim_graph_destroy(w.s, child);
  world_free(&w, inner);
  end();
}

/* Inside the body of a conditional node only the body's memory is reused. What is freed of the
 * outer capture meanwhile has no point in it. */
TEST(a_body_keeps_to_itself)
{
  begin();
  capture_begin();
  void *x = block(X, r), *y = block(Y, r), *z = block(18, r);
  world_wait(&w, t, r);
  world_free(&w, x);
  sim_capture_body(w.s, 0, r.handle, s.handle);
  void *inside = block(X, s);
  CHECK(inside != x);
  sim_kernel(w.s, 0, s.handle, y, 512, SIM_WRITE);
  world_free(&w, inside);
  CHECK(block(X, s) == inside);
  world_free(&w, y);
  CHECK(block(Y, t) != y);
  CHECK(!sim_capture_end(w.s, 0, s.handle));
  world_free(&w, z);
  CHECK(block(18, r) == z);
  world_free(&w, inside);
  CHECK(block(X, r) == x);
  world_wait(&w, r, t);
  capture_end();
  end();
}

/* A body goes on in s; y is of the outer capture, on a branch that t has joined to r. */
static void *begin_beside_a_body(void)
{
  capture_begin();
  world_wait(&w, t, r);
  void *y = block(Y, t);
  world_wait(&w, r, t);
  sim_capture_body(w.s, 0, r.handle, s.handle);
  return y;
}

/* The body reads y and is a node that t does not come after. Next time the driver does
 * not say what is captured. */
static void read_in_the_body_unasked(const void *y)
{
  sim_kernel(w.s, 0, s.handle, y, 512, SIM_READ);
  sim_fail_call(w.s, SIM_CALL_stream_capture, 1, ESPER_DEVICE_ERROR);
}

static void end_without_y_again(void *y)
{
  world_free(&w, y);
  CHECK_EQ(sim_faults(w.s), 1);
  CHECK(block(Y, t) != y);
  CHECK(!sim_capture_end(w.s, 0, s.handle));
  world_wait(&w, r, t);
  capture_end();
  end();
}

/* The driver does not say whether the body is still being captured: it may be. */
TEST(a_body_that_cannot_be_asked_about_is_not_taken_for_over)
{
  begin();
  void *y = begin_beside_a_body();
  block(X, s);
  read_in_the_body_unasked(y);
  end_without_y_again(y);
}

/* The driver does not tell in which capture the thread allocates, so the thread is refused,
 * although it may be working in a body. What it then frees of the outer capture has no point there,
 * whether or not the core knows the stream. */
TEST(a_thread_that_was_refused_inside_a_body_may_be_inside)
{
  for (int met = 0; met < 2; met++) {
    begin();
    void *x = block(X, r), *p;
    if (met)
      world_use(&w, x, s, 0);
    void *y = begin_beside_a_body();
    read_in_the_body_unasked(y);
    CHECK_STATUS(esper_malloc(w.core, X * MIB, s, &p), ESPER_DEVICE_ERROR);
    CHECK_EQ(sim_faults(w.s), 1);
    end_without_y_again(y);
  }
}

/* Nor does it tell in which capture the thread marks a use. On a stream that the core knows the
 * mark is held; on another one it is refused. */
TEST(a_thread_whose_mark_nobody_can_place_may_be_inside_a_body)
{
  for (int met = 0; met < 2; met++) {
    begin();
    const void *marked = block(X, r);
    if (met)
      world_use(&w, marked, s, 0);
    void *y = begin_beside_a_body();
    read_in_the_body_unasked(y);
    esper_status status = esper_record_use(w.core, &marked, 1, s, 0, NULL);
    CHECK_STATUS(status, met ? ESPER_OK : ESPER_DEVICE_ERROR);
    CHECK_EQ(sim_faults(w.s), 1);
    end_without_y_again(y);
  }
}

/* A thread that was refused outside any body frees where it always did. */
TEST(a_thread_that_was_refused_in_the_capture_frees_there)
{
  begin();
  capture_begin();
  void *x = block(X, r), *p;
  sim_fail_call(w.s, SIM_CALL_stream_capture, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc(w.core, X * MIB, r, &p), ESPER_DEVICE_ERROR);
  world_free(&w, x);
  CHECK(block(X, r) == x);
  capture_end();
  end();
}

TEST(a_mortal_streams_free_is_its_own_affair)
{
  begin();
  esper_stream mortal = world_mortal(&w, 0);
  sim_capture_begin(w.s, 0, mortal.handle);
  void *x = block(X, mortal);
  world_free(&w, x);
  CHECK(block(X, mortal) == x);
  world_free(&w, x);
  world_wait(&w, s, mortal);
  CHECK(block(X, s) != x);
  world_wait(&w, mortal, s);
  sim_graph *graph = sim_capture_end(w.s, 0, mortal.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  end();
}

static int any_stream(void *context, void *stream)
{
  (void)context, (void)stream;
  return 1;
}

/* Captures come and go; what the core keeps of them goes with their uses. */
TEST(captures_leave_no_metadata)
{
  begin();
  for (int i = 0; i < 10; i++) {
    CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, any_stream, NULL));
    capture_begin();
    void *x = block(X, r), *y = block(Y, r);
    world_read_on(&w, s, x, r);
    world_use(&w, x, s, 0);
    world_free(&w, x);
    world_read_on(&w, s, y, r);
    world_use(&w, y, s, 0);
    world_wait(&w, r, s);
    sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
    CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
    world_free(&w, y);
    sim_graph_launch(w.s, graph, 0, o.handle);
    sim_graph_destroy(w.s, graph);
    CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
    CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
    CHECK_EQ(world_counters(&w, 0).uses_pending, 0);
    CHECK(!w.core->captures);
  }
  end();
}
