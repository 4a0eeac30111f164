/* malloc and free inside a capture: marks, frees and reuse by nodes of the graph. */
#include "core/requests/malloc_capture.h"

#include "core/base/arena.h"
#include "order/captures_world.h"

/* The program's own wait orders r after the mark, and not what the reader does later. */
TEST(a_mark_inside_lets_memory_be_reused_behind_the_programs_wait)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_wait(&w, r, s);
  void *y = block(Y, s);
  world_free(&w, x);
  CHECK(block(X, r) == x);
  world_free(&w, x);
  CHECK(block(X, r) == x); /* r comes after itself */
  world_wait(&w, r, s);
  world_free(&w, y);
  capture_end();
  CHECK_EQ(world_counters(&w, 0).captured_uses, 0);
  end();
}

/* r has waited for two streams and done nothing since: no node stands for that. */
TEST(a_mark_right_behind_a_wait_holds_the_memory)
{
  begin();
  capture_begin();
  world_kernel(&w, r, world_malloc(&w, 512, r));
  world_wait(&w, s, r);
  void *x = block(X, s);
  world_kernel(&w, r, world_malloc(&w, 512, r));
  world_wait(&w, r, s);
  world_use(&w, x, r, 0);
  world_free(&w, x);
  CHECK(block(X, s) != x);
  world_wait(&w, r, s);
  capture_end();
  end();
}

TEST(a_mark_until_the_free_holds_until_the_free)
{
  begin();
  capture_begin();
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, ESPER_USE_UNTIL_FREE);
  world_wait(&w, r, s);
  world_read_on(&w, s, x, r);
  world_free(&w, x);
  CHECK(block(X, r) != x);
  world_wait(&w, r, s);
  CHECK(block(X, r) == x);
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
