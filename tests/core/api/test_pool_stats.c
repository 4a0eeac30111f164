/* The figures of private pools. */
#include <stdbool.h>

#include "one_world.h"

static void begin(bool mapped)
{
  esper_config config = {.segments = mapped ? ESPER_SEGMENTS_MAPPED : ESPER_SEGMENTS_CLASSIC};
  begin_on((sim_options){.oracle = SIM_ORACLE_KNOWN, .virtual_memory = mapped}, &config);
}

static esper_pool *make(uint64_t id)
{
  return world_pool(&w, 0, 0, id);
}

static void *get(esper_pool *pool, size_t size)
{
  return world_malloc_from(&w, pool, size, r);
}

/* The figures of the pool at `index`, of `count` in all. */
static esper_pool_stats figures(size_t index, size_t count)
{
  esper_pool_stats *pools, found;
  size_t is;
  CHECK_OK(esper_get_pool_stats(w.core, 0, &pools, &is));
  CHECK_EQ(is, count);
  memset(&found, 0, sizeof found);
  if (count)
    found = pools[index];
  free(pools);
  CHECK(esper_core_is_valid(w.core));
  return found;
}

TEST(each_private_pool_with_memory_has_statistics)
{
  for (int mapped = 0; mapped < 2; mapped++) {
    begin(mapped);
    esper_pool *a = make(1), *b = make(2);
    world_free(&w, world_malloc(&w, MIB, r));
    figures(0, 0);
    void *p = get(a, 12 * MIB), *q = get(b, 2 * MIB - 512), *small = get(a, 512);
    CHECK_EQ(figures(0, 2).id[1], 1);
    CHECK_EQ(figures(1, 2).id[1], 2);
    esper_pool_stats of_a = figures(0, 2);
    check_stat(of_a.reserved_bytes[ESPER_LARGE], 12 * MIB, 12 * MIB, 12 * MIB, 0);
    check_stat(of_a.reserved_bytes[ESPER_SMALL], 2 * MIB, 2 * MIB, 2 * MIB, 0);
    check_stat(of_a.reserved_bytes[ESPER_ALL], 14 * MIB, 14 * MIB, 14 * MIB, 0);
    size_t of_b = mapped ? 2 * MIB : 20 * MIB;
    check_stat(figures(1, 2).reserved_bytes[ESPER_ALL], of_b, of_b, of_b, 0);
    world_free(&w, p);
    CHECK_OK(esper_pool_release(w.core, 0, 0, 1));
    CHECK_OK(esper_pool_empty(w.core, 0, 0, 1));
    check_stat(figures(0, 2).reserved_bytes[ESPER_ALL], 2 * MIB, 14 * MIB, 14 * MIB, 12 * MIB);
    world_free(&w, q);
    world_free(&w, small);
    end();
  }
}

SCENE_WITH(statistics_of_a_pool_are_reset, begin(false))
{
  esper_pool *a = make(1);
  void *p = get(a, 12 * MIB);
  world_free(&w, get(a, 14 * MIB));
  CHECK_OK(esper_pool_release(w.core, 0, 0, 1));
  CHECK_OK(esper_pool_empty(w.core, 0, 0, 1));
  CHECK_OK(esper_reset_accumulated_stats(w.core, 0));
  check_stat(figures(0, 1).reserved_bytes[ESPER_ALL], 12 * MIB, 26 * MIB, 0, 0);
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  check_stat(figures(0, 1).reserved_bytes[ESPER_ALL], 12 * MIB, 12 * MIB, 0, 0);
  world_free(&w, p);
}

SCENE_WITH(a_pool_that_is_gone_has_no_statistics, begin(false))
{
  world_free(&w, get(make(1), 12 * MIB));
  CHECK_OK(esper_pool_release(w.core, 0, 0, 1));
  figures(0, 1);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  figures(0, 0);
  world_free(&w, get(make(1), 14 * MIB));
  check_stat(figures(0, 1).reserved_bytes[ESPER_ALL], 14 * MIB, 14 * MIB, 14 * MIB, 0);
  CHECK_OK(esper_pool_release(w.core, 0, 0, 1));
}
