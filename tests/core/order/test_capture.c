/* What comes before what inside a capture, by nodes of the graph. */
#include "core/order/capture.h"

#include "captures_world.h"

/* A capture that was invalidated runs nothing: its streams get what they may
 * have after it. Its nodes are not touched again. */
SCENE(an_invalidated_capture_counts_as_none)
{
  void *free_before = block(X, r);
  world_free(&w, free_before);
  capture_begin();
  void *x = block(X, r), *y = block(Y, r);
  world_read_marked(&w, s, x, r);
  void *event = sim_event_create(w.s, 0);
  CHECK_OK(sim_event_record(w.s, 0, event, o.handle));
  CHECK_STATUS(sim_stream_wait(w.s, 0, r.handle, event), ESPER_CAPTURING);
  sim_event_destroy(w.s, 0, event);
  world_free(&w, x);
  world_use(&w, y, s, 0);
  world_free(&w, y);
  CHECK(world_malloc(&w, X, r) == free_before);
  CHECK(!sim_capture_end(w.s, 0, r.handle));
  world_kernel(&w, r, free_before);
  world_malloc(&w, X, r);
  world_malloc(&w, X, s);
}

SIM_HOOK(abort_capture)
{
  sim_before_call(w.s, SIM_CALL_capture_before, NULL, NULL);
  sim_capture_abort(w.s, of_device, r.handle);
}

/* Another thread may do it between any two calls of the driver. */
SCENE(a_capture_that_ends_during_the_walk_is_not_walked_on)
{
  capture_begin();
  void *x = block(X, r);
  read_and_free(x, s);
  world_wait(&w, r, s);
  sim_kernel(w.s, 0, r.handle, NULL, 0, SIM_READ);
  sim_before_call(w.s, SIM_CALL_capture_before, abort_capture, NULL);
  CHECK(world_malloc(&w, X, r) != x);
  CHECK(!sim_capture_is_valid(w.s, 0, r.handle));
}

SCENE(a_child_graph_is_a_node)
{
  capture_begin();
  void *inner = block(X, r);
  sim_graph *child = sim_capture_end(w.s, 0, r.handle);
  capture_begin();
  void *x = block(X, r);
  world_wait(&w, s, r);
  sim_graph_launch(w.s, child, 0, s.handle);
  read_and_free(x, s);
  CHECK(block(X, r) != x);
  world_wait(&w, r, s);
  CHECK(block(X, r) == x);
  capture_end();
  sim_graph_destroy(w.s, child);
  world_free(&w, inner);
}

SCENE(a_mortal_streams_free_is_its_own_affair)
{
  esper_stream mortal = world_mortal(&w, 0);
  sim_capture_begin(w.s, 0, mortal.handle);
  void *x = block(X, mortal);
  uint64_t before = calls(SIM_CALL_stream_capture);
  world_free(&w, x);
  CHECK_EQ(calls(SIM_CALL_stream_capture), before); /* its handle may be another stream's by now */
  CHECK(block(X, mortal) == x);
  world_free(&w, x);
  world_wait(&w, s, mortal);
  CHECK(block(X, s) != x);
  world_wait(&w, mortal, s);
  sim_graph *graph = captured(mortal);
  sim_graph_destroy(w.s, graph);
}

/* Captures come and go; what the core keeps of them goes with their uses. */
SCENE(captures_leave_no_metadata)
{
  for (int i = 0; i < 10; i++) {
    CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, world_any_stream, NULL));
    capture_begin();
    void *x = block(X, r), *y = block(Y, r);
    read_and_free(x, s);
    world_read_marked(&w, s, y, r);
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
}

/* ---- points and vector clocks -------------------------------------------------- */

static void node(esper_stream stream)
{
  sim_kernel(w.s, 0, stream.handle, NULL, 0, SIM_READ);
}

SCENE(a_point_is_new_only_where_something_was_recorded)
{
  stream_t *stream = present(r).stream;
  branch_t *branch = capture_branch(w.core, stream, capture_begin());
  capture_point_t empty, first, same, second;
  CHECK(branch_point(branch, r.handle, &empty));
  CHECK_EQ(empty.number, 0);
  node(r);
  CHECK(branch_point(branch, r.handle, &first));
  CHECK(branch_point(branch, r.handle, &same));
  node(r);
  CHECK(branch_point(branch, r.handle, &second));
  CHECK_EQ(first.number, 1);
  CHECK(same.number == 1);
  CHECK(second.number == 2);
  capture_point_t *points[] = {&empty, &first, &same, &second};
  for (int i = 0; i < 4; i++) {
    capture_point_drop(points[i]);
    CHECK(!points[i]->branch);
  }
  CHECK(w.core->captures); /* the branch is still referred to */
  branch_drop(branch);
  CHECK(!w.core->captures);
  sim_capture_abort(w.s, 0, r.handle);
}

SCENE(a_stream_that_left_the_capture_has_no_point)
{
  stream_t *stream = present(r).stream;
  branch_t *branch = capture_branch(w.core, stream, capture_begin());
  capture_point_t point;
  node(r);
  sim_capture_abort(w.s, 0, r.handle);
  CHECK(!branch_point(branch, r.handle, &point));
  CHECK(!point.branch);
  branch_drop(branch);
  CHECK(!w.core->captures);
}

/* s has a point, and `between` nodes follow it before r's last one. */
static bool comes_after(unsigned between)
{
  begin();
  stream_t *on_r = present(r).stream, *on_s = present(s).stream;
  uint64_t capture = capture_begin();
  branch_t *of_r = capture_branch(w.core, on_r, capture);
  branch_t *of_s = capture_branch(w.core, on_s, capture);
  capture_point_t point;
  world_wait(&w, s, r);
  node(s);
  CHECK(branch_point(of_s, s.handle, &point));
  CHECK(branch_is_after(of_s, &point));
  CHECK(!branch_is_after(of_r, &point));
  world_wait(&w, r, s);
  for (unsigned i = 0; i < between; i++)
    node(r);
  branch_learn(of_r, r.handle);
  bool after = branch_is_after(of_r, &point);
  capture_point_drop(&point);
  branch_drop(of_r);
  branch_drop(of_s);
  sim_capture_abort(w.s, 0, r.handle);
  end();
  return after;
}

TEST(a_walk_finds_what_is_not_too_far_back)
{
  CHECK(comes_after(1));
  CHECK(comes_after(100));
  CHECK(!comes_after(200)); /* that it is not found withholds memory, nothing else */
}

/* ---- several tails ---------------------------------------------------------------- */

/* r's own long past is not walked over again after each join: there would be no visits left for
 * t's. */
SCENE(what_was_walked_over_before_a_join_is_not_walked_over_again)
{
  uint64_t capture = capture_begin();
  branch_t *of_r = capture_branch(w.core, present(r).stream, capture);
  branch_t *of_t = capture_branch(w.core, present(t).stream, capture);
  capture_point_t point;
  node(r);
  world_wait(&w, s, r);
  world_wait(&w, t, r);
  node(s);
  node(t);
  CHECK(branch_point(of_t, t.handle, &point));
  for (int i = 0; i < 200; i++)
    node(r);
  branch_learn(of_r, r.handle);
  world_wait(&w, r, s);
  branch_learn(of_r, r.handle);
  for (int i = 0; i < 100; i++)
    node(t);
  world_wait(&w, r, t);
  branch_learn(of_r, r.handle);
  CHECK(branch_is_after(of_r, &point));
  capture_point_drop(&point);
  branch_drop(of_r);
  branch_drop(of_t);
  sim_capture_abort(w.s, 0, r.handle);
}

/* They cannot all be followed, which withholds memory and nothing else. */
SCENE(from_very_many_tails_nothing_is_learned)
{
  stream_t *on_r = present(r).stream;
  uint64_t capture = capture_begin();
  branch_t *of_r = capture_branch(w.core, on_r, capture);
  branch_t *of_s = capture_branch(w.core, present(s).stream, capture);
  capture_point_t point;
  node(r);
  world_wait(&w, s, r);
  node(s);
  CHECK(branch_point(of_s, s.handle, &point));
  for (int i = 0; i < 80; i++) {
    esper_stream one = world_stream(&w, 0);
    world_wait(&w, one, r);
    node(one);
    world_wait(&w, r, one);
  }
  world_wait(&w, r, s);
  branch_learn(of_r, r.handle);
  CHECK(!branch_is_after(of_r, &point));
  node(r);
  branch_learn(of_r, r.handle); /* one tail, but the node behind it has too many */
  CHECK(!branch_is_after(of_r, &point));
  capture_point_drop(&point);
  branch_drop(of_r);
  branch_drop(of_s);
  sim_capture_abort(w.s, 0, r.handle);
}

/* s has joined others when its use ends, so that its next node stands for it. The memory serves a
 * later capture. */
SCENE(a_use_that_is_marked_after_a_join_holds_its_memory_for_this_capture)
{
  enum { LATER = 3 };
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, world_any_stream, NULL));
  capture_begin();
  sim_capture_group(w.s, 0, r.handle, 7);
  void *x = block(X, r);
  world_wait(&w, s, r);
  world_wait(&w, t, r);
  sim_kernel(w.s, 0, s.handle, x, 512, SIM_READ);
  node(t);
  world_wait(&w, s, t);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  world_wait(&w, r, s);
  node(r);
  CHECK(block(X, r) != x);
  capture_end();
  CHECK_EQ(world_counters(&w, 0).captured_uses, 0); /* it is the capture's own memory */
  CHECK_EQ(world_counters(&w, 0).captured_frees, 0);
  bool served = false;
  for (int i = 0; i < LATER; i++) {
    CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
    CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, world_any_stream, NULL));
    capture_begin();
    sim_capture_group(w.s, 0, r.handle, 7);
    for (int k = 0; k < 4; k++)
      served |= block(X, r) == x;
    capture_end();
  }
  CHECK(served);
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
}
