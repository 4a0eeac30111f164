/* Pools and their heaps: whom their memory serves, and how long they keep it. */
#include "core/pools/pool.h"

#include "core/order/stream.h"
#include "graph_pools.h"

static void *get(esper_pool *pool, size_t size, esper_stream stream)
{
  void *p;
  CHECK_OK(esper_malloc_from(w.core, pool, size, stream, &p));
  sim_owner_begin(w.s, p, world_size(&w, p), stream.device, stream.handle);
  return p;
}

TEST(memory_of_one_pool_never_serves_another)
{
  begin();
  esper_pool *a, *b;
  CHECK_OK(esper_pool_create(w.core, 0, 1, 2, &a));
  CHECK_OK(esper_pool_create(w.core, 0, 3, 4, &b));
  void *p = get(a, 12 * MIB, r);
  world_free(&w, p);
  void *q = get(b, 12 * MIB, r), *d = world_malloc(&w, 12 * MIB, r);
  CHECK(q != p && d != p && d != q);
  CHECK(get(a, 12 * MIB, r) == p);
  esper_failure failure;
  void *none;
  CHECK_STATUS(esper_malloc_from(w.core, a, (size_t)1 << 40, r, &none), ESPER_OUT_OF_MEMORY);
  esper_get_failure(&failure);
  CHECK_EQ(failure.private_pools, 24 * MIB);
  end();
}

TEST(a_heap_is_of_a_stream_and_a_capture)
{
  begin();
  world_malloc(&w, 512, r);
  world_malloc(&w, 512, s);
  device_t *device = &w.core->devices[0];
  presented_t a, b;
  CHECK_OK(stream_present(w.core, r, &a));
  CHECK_OK(stream_present(w.core, s, &b));
  heap_t *heap = pool_heap(device->default_pool, a.stream, 0, TAG_NONE);
  CHECK(heap && heap == pool_heap(device->default_pool, a.stream, 0, TAG_NONE));
  CHECK(heap != pool_heap(device->default_pool, b.stream, 0, TAG_NONE));
  CHECK(heap != pool_heap(device->default_pool, a.stream, 5, TAG_NONE));
  CHECK(heap_is_valid(heap));
  end();
}

TEST(memory_of_a_capture_stays_with_it)
{
  begin();
  sim_capture_begin(w.s, 0, r.handle);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, r) == p); /* inside: reused */
  world_free(&w, p);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(world_malloc(&w, 12 * MIB, r) != p); /* outside: replays touch it */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_graph_launch(w.s, graph, 0, s.handle);
  sim_capture_begin(w.s, 0, r.handle);
  CHECK(world_malloc(&w, 12 * MIB, r) != p); /* another capture */
  sim_capture_abort(w.s, 0, r.handle);
  sim_graph_destroy(w.s, graph);
  end();
}

/* ---- pools of graphs ------------------------------------------------------ */

TEST(a_graphs_memory_stays_until_the_graph_goes)
{
  begin();
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, r) == p); /* reused inside */
  world_free(&w, p);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_OK(esper_pool_empty(w.core, 0, ID, 0));
  CHECK_EQ(reserved(), 12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  sim_graph_launch(w.s, graph, 0, s.handle);
  drop(graph, ID);
  CHECK_EQ(references(ID), 0);
  CHECK_EQ(reserved(), 24 * MIB);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* waits for the replay */
  CHECK_EQ(reserved(), 12 * MIB);
  CHECK_EQ(sim_pending_all(w.s), 0);
  end();
}

/* The replay, on a stream that the core has never met, is still running. */
TEST(memory_that_a_graph_may_touch_is_not_given_back)
{
  begin();
  esper_stream unknown = world_mortal(&w, 0);
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
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
  end();
}

TEST(an_output_that_outlives_its_graph_is_freed_behind_the_last_replay)
{
  begin();
  capture_begin(ID);
  void *out = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, out);
  sim_graph *graph = capture_end(ID);
  drop(graph, ID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  world_read_on(&w, s, out, r); /* nobody marks it */
  world_wait(&w, r, s);
  world_free(&w, out);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  end();
}

/* What a capture freed serves the next one of its pool, on any stream. */
TEST(graphs_of_one_pool_share_memory)
{
  begin();
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r), *out = world_malloc(&w, 16 * MIB, r);
  world_kernel(&w, r, p);
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
  end();
}

TEST(a_wholly_free_segment_serves_another_stream_of_the_next_capture)
{
  begin();
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  world_free(&w, p);
  sim_graph *first = capture_end(ID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, captured, &w));
  sim_capture_begin(w.s, 0, s.handle);
  sim_capture_group(w.s, 0, s.handle, ID);
  CHECK(world_malloc(&w, 12 * MIB, s) == p);
  sim_graph *second = sim_capture_end(w.s, 0, s.handle);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  drop(first, ID);
  drop(second, ID);
  end();
}

/* One event for all streams does, which waits for the replays, too. */
TEST(a_graph_that_went_costs_no_synchronisation)
{
  begin();
  capture_begin(ID);
  world_kernel(&w, r, world_malloc(&w, 512, r));
  drop(capture_end(ID), ID);
  uint64_t before = sim_calls(w.s, SIM_CALL_device_synchronize);
  for (int i = 0; i < 3; i++)
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(sim_calls(w.s, SIM_CALL_device_synchronize), before);
  end();
}

/* Of two captures that one stream was in while the pool was open, nothing is left but their memory;
 * an output keeps the pool. */
TEST(captures_of_one_stream_leave_one_heap)
{
  begin();
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, captured, &w));
  sim_graph *graph[2];
  void *kept[2];
  for (int i = 0; i < 2; i++) {
    sim_capture_begin(w.s, 0, r.handle);
    kept[i] = world_malloc(&w, 12 * MIB, r);
    world_kernel(&w, r, kept[i]);
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
  end();
}

/* ---- pools that are begun without a capture ------------------------------- */

/* A pool of eager work alone, begun in every step, does not grow. */
TEST(a_pool_without_captures_reuses_its_memory_at_once)
{
  begin();
  void *first = NULL;
  for (int step = 0; step < 4; step++) {
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
    for (int i = 0; i < 4; i++) {
      void *p = world_malloc(&w, 12 * MIB, r);
      world_kernel(&w, r, p);
      CHECK(!first || p == first);
      first = p;
      world_free(&w, p);
    }
    CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  }
  CHECK_EQ(reserved(), 12 * MIB);
  end();
}

/* Freed between the begin and the first malloc: no capture had a chance to get it. */
TEST(what_is_freed_after_a_begin_serves_where_nothing_is_captured)
{
  begin();
  void *p = NULL;
  for (int step = 0; step < 4; step++) {
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
    if (p)
      world_free(&w, p);
    void *q = world_malloc(&w, 12 * MIB, r);
    CHECK(!p || q == p);
    p = q;
    world_kernel(&w, r, p);
    world_read_on(&w, s, p, r);
    world_use(&w, p, s, 0);
    CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
    sim_run_all(w.s);
  }
  CHECK_EQ(reserved(), 12 * MIB);
  end();
}

/* What a tree of graphs may read does not, though none of them was handed it. */
TEST(a_trees_memory_waits_for_the_next_begin)
{
  begin();
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
  end();
}

/* Nor does what a graph was handed: it may be replayed on another stream. */
TEST(what_a_graph_was_handed_waits_for_the_next_begin)
{
  begin();
  capture_begin(ID);
  void *x = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, x);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  sim_graph_launch(w.s, graph, 0, s.handle);
  world_free(&w, x);
  CHECK(world_malloc(&w, 12 * MIB, r) != x);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  drop(graph, ID);
  end();
}
