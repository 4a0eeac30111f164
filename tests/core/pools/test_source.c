/* Where the segments of a pool come from: the driver, or an allocator of the program's. */
#include "core/pools/source.h"

#include "core/base/types.h"
#include "mem_pools.h"

TEST(segments_come_from_the_pools_allocator_and_go_back_to_it)
{
  begin(256);
  use_own();
  void *a = get(6 * MIB, r), *b = get(6 * MIB, r), *c = get(12 * MIB, s);
  CHECK(b == (char *)a + 6 * MIB);
  CHECK_EQ(o.live, 2);
  CHECK_EQ(reserved(), 32 * MIB);
  world_malloc(&w, 12 * MIB, r);
  CHECK_EQ(o.live, 2); /* the default pool's are the driver's */
  world_free(&w, a);
  world_free(&w, b);
  CHECK_OK(esper_pool_empty(w.core, 0, 0, ID));
  CHECK_EQ(o.live, 2); /* the pool is there: it keeps what it has */
  release();
  CHECK_OK(esper_pool_empty(w.core, 0, 0, ID));
  CHECK_EQ(o.live, 1);
  CHECK_EQ(o.dropped, 0); /* its memory is out */
  world_free(&w, c);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(o.live, 0);
  CHECK_EQ(o.dropped, 1);
  end();
  CHECK_EQ(o.dropped, 1);
}

SCENE_WITH(a_pool_without_memory_drops_its_allocator_at_once, begin(256))
{
  use_own();
  release();
  CHECK_EQ(o.dropped, 1);
}

SCENE_WITH(what_the_allocator_answers_the_malloc_answers, begin(256))
{
  use_own();
  void *p;
  o.answer = ESPER_OUT_OF_MEMORY;
  CHECK_STATUS(esper_malloc_from(w.core, pool, MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(world_stats(&w, 0).num_ooms, 1);
  o.answer = ESPER_DEVICE_ERROR;
  CHECK_REFUSED(esper_malloc_from(w.core, pool, MIB, r, &p), ESPER_DEVICE_ERROR, "(0, 5)");
  o.answer = ESPER_OK;
  o.shift = 16;
  CHECK_REFUSED(esper_malloc_from(w.core, pool, MIB, r, &p), ESPER_INVALID, "multiples of 512");
  CHECK_EQ(o.live, 0);
  o.shift = 0;
  CHECK_EQ(reserved(), 0);
  /* The driver had memory all the time. */
  CHECK_EQ(w.core->devices[0].refused, 0);
  get(MIB, r);
}

/* ---- asked directly --------------------------------------------------------------- */

static esper_status obtain_nothing(void *context, int device, size_t size, void **address)
{
  (void)context, (void)device, (void)size, (void)address;
  return ESPER_OK;
}

/* Its word that all is well is not enough. */
SCENE_WITH(an_allocator_that_gives_no_address_is_out_of_memory, begin(64))
{
  uintptr_t address = 0;
  pool->source = (esper_source){obtain_nothing, own_give_back, NULL, &o};
  CHECK_STATUS(source_obtain(pool, 2 * MIB, &address), ESPER_OUT_OF_MEMORY);
  CHECK(strstr(esper_last_error(), "did not provide a segment of 2097152 bytes"));
  CHECK(!address);
  source_drop(pool); /* it need not know */
}
