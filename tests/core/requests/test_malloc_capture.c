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
 * after all that both do. */
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
  CHECK(block(9, r) != x && block(11, r) != x); /* all of a new segment */
  CHECK(block(9, t) != x && block(11, t) != x);
  world_wait(&w, t, s);
  world_wait(&w, t, r);
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

/* A free inside a capture needs host memory for its point. Nothing else says what comes after it,
 * so the block waits for the next quiesce. */
TEST(a_free_without_host_memory_for_its_point_withholds_the_block)
{
  begin();
  capture_begin();
  void *x = block(X, r), *y = block(Y, r);
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
  world_free(&w, y);
  CHECK(block(X, r) == y); /* the larger one fits, too */
  CHECK(block(X, r) != x);
  capture_end();
  end();
}
