/* malloc and free inside a capture: marks, frees and reuse by nodes of the graph. */
#include "core/requests/malloc_capture.h"

#include "core/base/arena.h"
#include "order/captures_world.h"

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

TEST(a_mark_until_the_free_is_depended_on_from_the_free)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, ESPER_USE_UNTIL_FREE);
  world_read_on(&w, s, x, r);
  world_free(&w, x);
  CHECK(block(X, r) == x);
  CHECK_EQ(gates(), 1);
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

/* As under native: another branch may still read it without a mark. */
TEST(a_joined_streams_memory_stays_its_own)
{
  begin();
  capture_begin();
  world_wait(&w, s, r);
  void *x = block(X, s);
  world_free(&w, x);
  world_wait(&w, r, s);
  CHECK(block(X, r) != x);
  CHECK(block(X, s) == x);
  world_wait(&w, r, s);
  CHECK_EQ(gates(), 0);
  CHECK_EQ(world_counters(&w, 0).loans, 0);
  capture_end();
  end();
}

TEST(neighbours_inside_merge_when_what_both_owed_comes_before)
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
  CHECK(block(18, r) != a);
  world_wait(&w, r, t);
  CHECK(block(18, r) == a);
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
  CHECK_EQ(gates(), 1);
  CHECK(block(X, s) == x);
  world_wait(&w, r, s);
  capture_end();
  end();
}

static int on_r(void *context, void *stream)
{
  (void)context;
  return stream == r.handle;
}

/* Inside a capture nobody waits and nothing goes back; the next request that fits
 * is served, and the graph is whole. */
TEST(a_capture_survives_being_out_of_memory)
{
  begin_with(NULL, 44 * MIB);
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, on_r, NULL));
  sim_capture_begin(w.s, 0, r.handle);
  void *a = world_malloc(&w, 12 * MIB, r), *p;
  world_kernel(&w, r, a);
  CHECK_STATUS(esper_malloc(w.core, 40 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK(sim_capture_is_valid(w.s, 0, r.handle));
  world_free(&w, a);
  CHECK_EQ(world_malloc(&w, 12 * MIB, r) == a, 1);
  world_kernel(&w, r, a);
  void *b = world_malloc(&w, 32 * MIB, r);
  world_kernel(&w, r, b);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
  CHECK_STATUS(esper_malloc(w.core, 12 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  sim_graph_launch(w.s, graph, 0, s.handle);
  sim_graph_destroy(w.s, graph);
  world_free(&w, a);
  world_free(&w, b);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
  world_malloc(&w, 40 * MIB, s); /* all of it came back */
  end();
}

TEST(an_edge_that_is_refused_leaves_the_block_as_it_was)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  sim_fail_call(w.s, SIM_CALL_capture_depend, 1, ESPER_DEVICE_ERROR);
  CHECK(block(X, r) != x);
  CHECK_EQ(sim_faults(w.s), 1);
  CHECK_EQ(gates(), 0);
  CHECK(block(X, r) == x);
  CHECK_EQ(gates(), 1);
  world_wait(&w, r, s);
  capture_end();
  end();
}

TEST(a_free_inside_needs_no_host_memory)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  arena_t *uses = &w.core->devices[0].uses;
  void *taken = NULL, *piece;
  check_limit_malloc(0);
  while ((piece = arena_take(uses))) {
    *(void **)piece = taken;
    taken = piece;
  }
  world_free(&w, x);
  check_limit_malloc(-1);
  for (; taken; taken = piece) {
    piece = *(void **)taken;
    arena_give(uses, taken);
  }
  CHECK(block(X, r) == x);
  capture_end();
  end();
}
