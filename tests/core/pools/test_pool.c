/* Pools and their heaps: whom their memory serves, and how long they keep it. */
#include "core/pools/pool.h"

#include "core/order/stream.h"
#include "graph_pools.h"

/* ---- pools of graphs ------------------------------------------------------ */

/* The replay, on a stream that the core has never met, is still running. */
SCENE(memory_that_a_graph_may_touch_is_not_given_back)
{
  esper_stream unknown = world_mortal(&w, 0);
  capture_begin(ID);
  void *p = block(12 * MIB, r);
  world_free(&w, p);
  sim_graph *graph = capture_end(ID);
  sim_graph_launch(w.s, graph, 0, unknown.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_graph_launch(w.s, graph, 0, unknown.handle);
  drop(graph, ID);
  sim_capture_begin(w.s, 0, s.handle); /* the device cannot be waited for */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 12 * MIB);
  sim_capture_abort(w.s, 0, s.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
}

/* What a capture freed serves the next one of its pool, on any stream. */
SCENE(graphs_of_one_pool_share_memory)
{
  capture_begin(ID);
  void *p = block(12 * MIB, r), *out = world_malloc(&w, 16 * MIB, r);
  world_kernel(&w, r, out);
  world_free(&w, p);
  sim_graph *first = capture_end(ID);
  sim_graph_launch(w.s, first, 0, s.handle);
  capture_begin(ID);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  world_kernel(&w, r, p);
  CHECK(world_malloc(&w, 16 * MIB, r) != out);
  sim_graph *second = capture_end(ID);
  sim_graph_launch(w.s, first, 0, s.handle);
  sim_graph_launch(w.s, second, 0, s.handle);
  CHECK_EQ(references(ID), 2);
  drop(first, ID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 12 * MIB * 1 + 2 * 16 * MIB);
  drop(second, ID);
}

SCENE(a_wholly_free_segment_serves_another_stream_of_the_next_capture)
{
  capture_begin(ID);
  void *p = block(12 * MIB, r);
  world_free(&w, p);
  sim_graph *first = capture_end(ID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, world_is_captured, &w));
  sim_capture_begin(w.s, 0, s.handle);
  sim_capture_group(w.s, 0, s.handle, ID);
  CHECK(world_malloc(&w, 12 * MIB, s) == p);
  sim_graph *second = sim_capture_end(w.s, 0, s.handle);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  drop(first, ID);
  drop(second, ID);
}

/* Of two captures that one stream was in while the pool was open, nothing is left but their memory;
 * an output keeps the pool. */
SCENE(captures_of_one_stream_leave_one_heap)
{
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, world_is_captured, &w));
  sim_graph *graph[2];
  void *kept[2];
  for (int i = 0; i < 2; i++) {
    sim_capture_begin(w.s, 0, r.handle);
    kept[i] = block(12 * MIB, r);
    graph[i] = sim_capture_end(w.s, 0, r.handle);
  }
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  sim_graph_destroy(w.s, graph[0]);
  drop(graph[1], ID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* the device was synchronised */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  world_check(&w);
  for (int i = 0; i < 2; i++)
    world_free(&w, kept[i]);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
}

/* ---- pools that are begun without a capture ------------------------------- */

/* Freed between the begin and the first malloc: no capture had a chance to get it. */
SCENE(what_is_freed_after_a_begin_serves_where_nothing_is_captured)
{
  void *p = NULL;
  for (int step = 0; step < 4; step++) {
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
    if (p)
      world_free(&w, p);
    void *q = world_malloc(&w, 12 * MIB, r);
    CHECK(!p || q == p);
    p = q;
    world_kernel(&w, r, p);
    world_read_marked(&w, s, p, r);
    CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
    sim_run_all(w.s);
  }
  CHECK_EQ(reserved(), 12 * MIB);
}

/* What a tree of graphs may read does not, though none of them was handed it. */
SCENE(a_trees_memory_waits_for_the_next_begin)
{
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, r);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  esper_checkpoint *checkpoint;
  CHECK_OK(esper_checkpoint_take(w.core, 0, ID, 0, &checkpoint));
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  esper_checkpoint_free(checkpoint);
}
