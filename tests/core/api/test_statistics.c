/* The public functions of statistics, counters and limits. */
#include "core/blocks/heap.h"
#include "one_world.h"

BEGIN(WHEN_TOLD)

SCENE(devices_that_are_not_there_have_no_figures)
{
  size_t size, total;
  esper_stats stats;
  esper_counters counters;
  for (int device = -1; device < 4; device += 2) {
    CHECK_STATUS(esper_get_stats(w.core, device, &stats), ESPER_INVALID);
    CHECK_STATUS(esper_get_counters(w.core, device, &counters), ESPER_INVALID);
    CHECK_STATUS(esper_reset_peak_stats(w.core, device), ESPER_INVALID);
    CHECK_STATUS(esper_reset_accumulated_stats(w.core, device), ESPER_INVALID);
    CHECK_STATUS(esper_memory_info(w.core, device, &size, &total), ESPER_INVALID);
    CHECK_STATUS(esper_largest_available(w.core, device, &size), ESPER_INVALID);
    CHECK_STATUS(esper_set_memory_fraction(w.core, device, 0.5), ESPER_INVALID);
    CHECK_EQ(esper_get_memory_fraction(w.core, device), 1);
  }
}

/* The driver would make a context there, of some hundred MiB. */
SCENE_WITH(who_only_looks_wakes_no_device,
           begin_on((sim_options){.devices = 2, .capacity = 1000 * MIB}, NULL))
{
  world_free(&w, world_malloc(&w, 3 * MIB, w.stream[0]));
  uint64_t calls = sim_calls(w.s, SIM_CALL_memory_total);
  esper_stats stats;
  esper_counters counters;
  esper_pool_stats *pools;
  size_t count;
  CHECK_OK(esper_empty_cache(w.core, 1, NULL));
  CHECK_OK(esper_pool_empty(w.core, 1, 7, 0));
  CHECK_OK(esper_get_stats(w.core, 1, &stats));
  CHECK_EQ(stats.max_split_size, -1);
  CHECK_EQ(stats.reserved_bytes[ESPER_ALL].peak, 0);
  CHECK_OK(esper_reset_peak_stats(w.core, 1));
  CHECK_OK(esper_reset_accumulated_stats(w.core, 1));
  CHECK_OK(esper_get_counters(w.core, 1, &counters));
  esper_retire(w.core, 1);
  CHECK_OK(esper_get_pool_stats(w.core, 1, &pools, &count));
  CHECK_EQ(count, 0);
  CHECK_OK(esper_set_memory_fraction(w.core, 1, 0.25));
  CHECK(esper_get_memory_fraction(w.core, 1) == 0.25);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_memory_total), calls);
  CHECK_STATUS(esper_empty_cache(w.core, 2, NULL), ESPER_INVALID);
  CHECK_STATUS(esper_get_stats(w.core, 2, &stats), ESPER_INVALID);
  CHECK_STATUS(esper_set_memory_fraction(w.core, 2, 0.5), ESPER_INVALID);
  /* The fraction holds from the first use on. */
  esper_stream other = world_stream(&w, 1);
  CHECK_STATUS(try_malloc(260 * MIB, other), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_memory_total), calls + 1);
  world_free(&w, world_malloc(&w, 240 * MIB, other));
}

/* ---- statistics ------------------------------------------------------------------- */

/* Nobody has to ask the events first. */
SCENE(figures_count_what_is_over_as_over)
{
  void *p = world_malloc(&w, 12 * MIB, r);
  read_and_free(p, s);
  CHECK_EQ(world_stats(&w, 0).active_bytes[ESPER_ALL].current, 12 * MIB);
  sim_run_all(w.s);
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  CHECK_EQ(world_stats(&w, 0).active_bytes[ESPER_ALL].peak, 0);
}

/* ---- counters --------------------------------------------------------------------- */

/* The largest of any heap. */
SCENE(the_allowance_is_told)
{
  world_set_allowance(&w, 0);
  CHECK_EQ(world_counters(&w, 0).allowance, 128 * MIB); /* the device is not used yet */
  world_set_allowance(&w, ESPER_ALLOWANCE_OFF);
  CHECK_EQ(world_counters(&w, 0).allowance, 0);
  world_free(&w, world_malloc(&w, 512, r));
  world_malloc(&w, 512, s);
  CHECK_EQ(world_counters(&w, 0).allowance, 0); /* it is off */
  world_set_allowance(&w, 0);
  CHECK_EQ(world_counters(&w, 0).allowance, 128 * MIB);
  world_set_allowance(&w, 20 * MIB);
  CHECK_EQ(world_counters(&w, 0).allowance, 20 * MIB);
  lock(&w.core->devices[0].lock);
  w.core->devices[0].heaps->allowance_doubled = 2;
  unlock(&w.core->devices[0].lock);
  CHECK_EQ(world_counters(&w, 0).allowance, 80 * MIB);
}

SCENE(driver_calls_are_counted_by_name)
{
  void *p = world_malloc(&w, 512, w.stream[0]);
  world_read_marked(&w, w.stream[1], p, w.stream[0]);
  uint64_t counted = 0;
  int names = 0;
  for (; esper_driver_call_name(names); names++) {
    int call = 0;
    while (strcmp(sim_call_name((sim_call)call), esper_driver_call_name(names)))
      CHECK(++call < SIM_CALL_COUNT);
    CHECK_EQ(esper_driver_calls(w.core, names), sim_calls(w.s, (sim_call)call));
    counted += esper_driver_calls(w.core, names);
  }
  CHECK(names > 10);
  CHECK_EQ(counted + sim_calls(w.s, SIM_CALL_device_count), sim_calls(w.s, SIM_CALL_any));
  CHECK(!esper_driver_call_name(-1));
  CHECK_EQ(esper_driver_calls(w.core, names), 0);
}

/* ---- limits ----------------------------------------------------------------------- */

/* What was freed last lies in a block cache. */
SCENE_WITH(the_largest_available_counts_cached_blocks_merged,
           begin_on((sim_options){.capacity = 20 * MIB, .completion = SIM_AT_ONCE}, NULL))
{
  size_t largest;
  void *p[3];
  for (int i = 0; i < 3; i++)
    p[i] = world_malloc(&w, 6 * MIB, r);
  CHECK_OK(esper_largest_available(w.core, 0, &largest));
  CHECK_EQ(largest, 2 * MIB);
  world_free(&w, p[0]);
  world_free(&w, p[1]);
  CHECK_OK(esper_largest_available(w.core, 0, &largest));
  CHECK_EQ(largest, 12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) == p[0]);
}

SCENE(a_memory_fraction_that_is_none_is_refused)
{
  static const double BAD[] = {-0.01, 1.01, 0.0 / 0.0};
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.75));
  for (int i = 0; i < 3; i++) {
    CHECK_STATUS(esper_set_memory_fraction(w.core, 0, BAD[i]), ESPER_INVALID);
    CHECK(strstr(esper_last_error(), "a number from 0 to 1"));
  }
  CHECK(esper_get_memory_fraction(w.core, 0) == 0.75);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 1));
}
