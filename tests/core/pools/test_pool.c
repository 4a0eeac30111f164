#include "core/pools/pool.h"

#include "core/order/stream.h"
#include "world.h"

static world w;
static esper_stream r, s;

static void begin(void)
{
  sim_options options = {.devices = 2, .oracle = SIM_ORACLE_KNOWN};
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  s = w.stream[1];
}

static void end(void)
{
  world_end(&w);
}

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

TEST(references_are_of_private_pools)
{
  begin();
  esper_pool *a;
  CHECK_OK(esper_pool_create(w.core, 0, 1, 2, &a));
  CHECK_EQ(esper_pool_use_count(w.core, 0, 1, 2), 1);
  CHECK_EQ(esper_pool_use_count(w.core, 0, 0, 0), 0);
  CHECK_EQ(esper_pool_use_count(w.core, 0, 3, 4), 0);
  CHECK_EQ(esper_pool_use_count(w.core, 7, 1, 2), 0);
  end();
}

TEST(a_pools_id_is_in_the_snapshot_and_told_of_its_blocks)
{
  begin();
  esper_pool *a;
  esper_snapshot snapshot;
  esper_block_info info;
  CHECK_OK(esper_pool_create(w.core, 0, 11, 22, &a));
  CHECK_OK(esper_find_block(w.core, get(a, 512, r), &info));
  CHECK(info.pool[0] == 11 && info.pool[1] == 22);
  CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
  CHECK_EQ(snapshot.segments[0].pool[0], 11);
  CHECK_EQ(snapshot.segments[0].pool[1], 22);
  esper_snapshot_free(&snapshot);
  end();
}

TEST(one_pool_can_be_emptied_when_nobody_refers_to_it)
{
  begin();
  esper_pool *a;
  CHECK_OK(esper_pool_create(w.core, 0, 1, 2, &a));
  world_free(&w, get(a, 12 * MIB, r));
  world_free(&w, world_malloc(&w, 14 * MIB, r));
  CHECK_OK(esper_empty_cache(w.core, 0, a));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 26 * MIB);
  CHECK_OK(esper_pool_release(w.core, 0, 1, 2));
  CHECK_OK(esper_pool_empty(w.core, 0, 1, 2));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 14 * MIB);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  end();
}

TEST(pools_belong_to_a_device)
{
  begin();
  esper_pool *a, *none;
  void *p;
  CHECK_OK(esper_pool_create(w.core, 1, 1, 2, &a));
  CHECK_STATUS(esper_malloc_from(w.core, a, 512, r, &p), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "device 1"));
  CHECK_STATUS(esper_pool_create(w.core, 2, 1, 2, &none), ESPER_INVALID);
  CHECK(!none);
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
  heap_t *heap = pool_heap(device->default_pool, a.stream, 0);
  CHECK(heap && heap == pool_heap(device->default_pool, a.stream, 0));
  CHECK(heap != pool_heap(device->default_pool, b.stream, 0));
  CHECK(heap != pool_heap(device->default_pool, a.stream, 5));
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
