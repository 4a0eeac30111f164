/* MemPools: their flags, and shortage of memory. */
#include "pools/mem_pools.h"

/* ---- flags ------------------------------------------------------------------ */

SCENE_WITH(a_pool_serves_others_when_memory_is_short, begin(24))
{
  set(ESPER_POOL_USE_ON_OOM);
  void *a = get(12 * MIB, r);
  void *full = world_malloc(&w, 12 * MIB, r);
  CHECK_STATUS(try_malloc(12 * MIB, r), ESPER_OUT_OF_MEMORY);
  world_free(&w, a);
  void *b = world_malloc(&w, 12 * MIB, r);
  CHECK(b == a);
  world_free(&w, b);
  CHECK(get(12 * MIB, r) == b); /* it stayed the pool's */
  world_free(&w, b);
  CHECK_OK(esper_pool_set_flags(w.core, 0, 0, ID, ESPER_POOL_USE_ON_OOM, 0));
  CHECK_STATUS(try_malloc(12 * MIB, s), ESPER_OUT_OF_MEMORY);
  release();
  CHECK(world_malloc(&w, 12 * MIB, s)); /* its segment goes back for it */
  CHECK_EQ(world_stats(&w, 0).num_device_free, 1);
  world_free(&w, full);
}

/* Its free memory still owes a read, for which the host waits. */
SCENE_WITH(what_serves_on_oom_may_be_pending, begin(12))
{
  set(ESPER_POOL_USE_ON_OOM);
  void *a = get(12 * MIB, r);
  world_kernel(&w, r, a);
  read_and_free(a, s);
  CHECK(world_malloc(&w, 12 * MIB, r) == a);
}

SCENE_WITH(a_pool_serves_no_other_pool, begin(24))
{
  set(ESPER_POOL_USE_ON_OOM);
  world_free(&w, get(12 * MIB, r));
  esper_pool *other = world_pool(&w, 0, 0, 6);
  void *q;
  world_malloc_from(&w, other, 12 * MIB, r);
  CHECK_STATUS(esper_malloc_from(w.core, other, 12 * MIB, r, &q), ESPER_OUT_OF_MEMORY);
  release();
  /* The segment goes back to the driver for it, as everybody's would. */
  world_malloc_from(&w, other, 12 * MIB, r);
  CHECK_EQ(world_stats(&w, 0).num_device_free, 1);
}

/* ---- memory that runs short -------------------------------------------------- */

SCENE_WITH(a_mem_pool_survives_being_out_of_memory, begin(44))
{
  use_own();
  void *a = get(12 * MIB, r), *p;
  CHECK_STATUS(esper_malloc_from(w.core, pool, 40 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  world_kernel(&w, r, a);
  world_free(&w, a);
  /* What it has cached stays where it is, even for itself: somebody may know it. */
  CHECK_STATUS(esper_malloc_from(w.core, pool, 40 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK(get(12 * MIB, r) == a);
  CHECK(get(32 * MIB, r));
  CHECK_EQ(o.live, 2);
}

/* It may be that of a capture which is about to begin. */
SCENE_WITH(a_pool_that_is_open_serves_no_others, begin_of(200))
{
  esper_pool *open = world_pool(&w, 0, 7, 0);
  CHECK_OK(esper_pool_set_flags(w.core, 0, 7, 0, ESPER_POOL_USE_ON_OOM, ESPER_POOL_USE_ON_OOM));
  void *p = world_malloc_from(&w, open, 40 * MIB, r);
  world_free(&w, p);
  sim_run_all(w.s);
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, world_is_captured, &w));
  CHECK_STATUS(try_malloc(300 * MIB, r), ESPER_OUT_OF_MEMORY);
  sim_capture_begin(w.s, 0, r.handle);
  CHECK(world_malloc(&w, 40 * MIB, r) == p);
  world_free(&w, p);
  sim_graph_destroy(w.s, sim_capture_end(w.s, 0, r.handle));
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
}
