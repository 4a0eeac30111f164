#include "core/stats/stats.h"

#include "world.h"
#include "core/stats/stat.h"

static world w;
static esper_stream r, s;

static void begin(void)
{
  world_begin(&w);
  r = w.stream[0];
  s = w.stream[1];
}

static void end(void)
{
  world_end(&w);
}

/* current, peak, allocated, freed */
static void check(esper_stat stat, long long c, long long p, long long a, long long f)
{
  CHECK_EQ(stat.current, c);
  CHECK_EQ(stat.peak, p);
  CHECK_EQ(stat.allocated, a);
  CHECK_EQ(stat.freed, f);
}

TEST(figures_of_a_short_life)
{
  begin();
  void *p = world_malloc(&w, 1000, r), *q = world_malloc(&w, 3 * MIB, r);
  esper_stats now = world_stats(&w, 0);
  check(now.allocation[ESPER_ALL], 2, 2, 2, 0);
  check(now.allocation[ESPER_SMALL], 1, 1, 1, 0);
  check(now.allocation[ESPER_LARGE], 1, 1, 1, 0);
  check(now.allocated_bytes[ESPER_SMALL], 1024, 1024, 1024, 0);
  check(now.requested_bytes[ESPER_SMALL], 1000, 1000, 1000, 0);
  check(now.requested_bytes[ESPER_ALL], 1000 + 3 * MIB, 1000 + 3 * MIB, 1000 + 3 * MIB, 0);
  check(now.reserved_bytes[ESPER_ALL], 22 * MIB, 22 * MIB, 22 * MIB, 0);
  check(now.segment[ESPER_LARGE], 1, 1, 1, 0);
  check(now.inactive_split[ESPER_ALL], 2, 2, 2, 0);
  check(now.inactive_split_bytes[ESPER_LARGE], 17 * MIB, 17 * MIB, 17 * MIB, 0);
  CHECK_EQ(now.num_device_alloc, 2);
  CHECK_EQ(now.max_split_size, -1);
  world_free(&w, p);
  world_free(&w, q);
  now = world_stats(&w, 0);
  CHECK_EQ(now.allocation[ESPER_ALL].current, 0);
  CHECK_EQ(now.allocation[ESPER_ALL].freed, 2);
  CHECK_EQ(now.active[ESPER_ALL].current, 0);
  CHECK_EQ(now.inactive_split[ESPER_ALL].current, 0); /* whole segments */
  CHECK_EQ(now.allocated_bytes[ESPER_ALL].peak, 1024 + 3 * MIB);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  now = world_stats(&w, 0);
  CHECK_EQ(now.segment[ESPER_ALL].current, 0);
  CHECK_EQ(now.segment[ESPER_ALL].freed, 2);
  CHECK_EQ(now.num_device_free, 2);
  end();
}

TEST(bytes_are_active_until_nothing_is_owed)
{
  begin();
  void *p = world_malloc(&w, 12 * MIB, r);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  esper_stats now = world_stats(&w, 0);
  CHECK_EQ(now.allocated_bytes[ESPER_ALL].current, 0);
  CHECK_EQ(now.active_bytes[ESPER_ALL].current, 12 * MIB);
  CHECK_EQ(now.requested_bytes[ESPER_ALL].current, 12 * MIB);
  CHECK_EQ(world_counters(&w, 0).bytes_pending, 12 * MIB);
  sim_run_all(w.s);
  now = world_stats(&w, 0); /* finds out */
  CHECK_EQ(now.active_bytes[ESPER_ALL].current, 0);
  CHECK_EQ(world_counters(&w, 0).bytes_pending, 0);
  CHECK_EQ(world_counters(&w, 0).uses_pending, 0);
  end();
}

TEST(a_gated_block_is_not_counted_twice)
{
  begin();
  void *p = world_malloc(&w, 12 * MIB, r);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  esper_stats now = world_stats(&w, 0);
  CHECK_EQ(now.active_bytes[ESPER_ALL].current, 12 * MIB);
  CHECK_EQ(now.active_bytes[ESPER_ALL].peak, 12 * MIB);
  CHECK_EQ(now.active[ESPER_ALL].allocated, 2);
  CHECK_EQ(now.active[ESPER_ALL].freed, 1);
  end();
}

TEST(peaks_and_totals_are_reset)
{
  begin();
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 512, r);
  world_free(&w, p);
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  esper_stats now = world_stats(&w, 0);
  CHECK_EQ(now.allocated_bytes[ESPER_ALL].peak, 512);
  CHECK_EQ(now.active_bytes[ESPER_ALL].peak, 512);
  CHECK_EQ(now.allocated_bytes[ESPER_ALL].allocated, 12 * MIB + 512);
  CHECK_OK(esper_reset_accumulated_stats(w.core, 0));
  now = world_stats(&w, 0);
  check(now.allocated_bytes[ESPER_ALL], 512, 512, 0, 0);
  CHECK_EQ(now.num_device_alloc, 0);
  world_free(&w, q);
  CHECK_EQ(world_stats(&w, 0).allocated_bytes[ESPER_ALL].freed, 512);
  CHECK_STATUS(esper_reset_peak_stats(w.core, 3), ESPER_INVALID);
  CHECK_STATUS(esper_reset_accumulated_stats(w.core, -1), ESPER_INVALID);
  CHECK_STATUS(esper_get_stats(w.core, 3, &now), ESPER_INVALID);
  end();
}

TEST(oversize_blocks_are_counted_by_the_limit_of_their_birth)
{
  begin();
  CHECK_OK(esper_configure(w.core, &(esper_config){.max_split_size = 20 * MIB}));
  void *p = world_malloc(&w, 40 * MIB, r);
  esper_stats now = world_stats(&w, 0);
  CHECK_EQ(now.max_split_size, 20 * MIB);
  check(now.oversize_allocations, 1, 1, 1, 0);
  check(now.oversize_segments, 1, 1, 1, 0);
  CHECK_OK(esper_configure(w.core, NULL));
  world_free(&w, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  now = world_stats(&w, 0);
  CHECK_EQ(now.oversize_allocations.current, 0);
  CHECK_EQ(now.oversize_segments.current, 0);
  end();
}
