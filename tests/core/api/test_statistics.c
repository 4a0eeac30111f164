/* The public functions of statistics, counters and limits. */
#include <pthread.h>
#include <stdatomic.h>

#include "core/blocks/heap.h"
#include "draw.h"
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

/* ---- while threads allocate -------------------------------------------------------- */

/* One picture of a busy core: what threads do is never half seen. */
static _Atomic int threads_left;

static void *churn(void *argument)
{
  esper_stream own = w.stream[(intptr_t)argument];
  void *p[16] = {0};
  for (int i = 0; i < 6000; i++) {
    int k = i * 7 % 16;
    CHECK_OK(esper_free(w.core, p[k]));
    CHECK_OK(esper_malloc(w.core, (size_t)(i % 40 + 1) * 40000, own, &p[k]));
  }
  for (int k = 0; k < 16; k++)
    CHECK_OK(esper_free(w.core, p[k]));
  atomic_fetch_sub(&threads_left, 1);
  return NULL;
}

SCENE_WITH(statistics_agree_at_any_moment, begin_on((sim_options){0}, NULL))
{
  pthread_t thread[3];
  atomic_store(&threads_left, 3);
  for (intptr_t i = 0; i < 3; i++)
    pthread_create(&thread[i], NULL, churn, (void *)i);
  while (atomic_load(&threads_left)) {
    CHECK(esper_core_is_valid(w.core));
    esper_stats stats = world_stats(&w, 0);
    CHECK(stats.allocated_bytes[ESPER_ALL].current <= stats.active_bytes[ESPER_ALL].current);
    CHECK(stats.active_bytes[ESPER_ALL].current <= stats.reserved_bytes[ESPER_ALL].current);
    CHECK_EQ(stats.allocated_bytes[ESPER_ALL].current,
             stats.allocated_bytes[ESPER_SMALL].current +
                 stats.allocated_bytes[ESPER_LARGE].current);
    for (int c = 0; c < ESPER_CLASSES; c++)
      CHECK_EQ(stats.allocated_bytes[c].current,
               stats.allocated_bytes[c].allocated - stats.allocated_bytes[c].freed);
  }
  for (int i = 0; i < 3; i++)
    pthread_join(thread[i], NULL);
}

/* ---- after random operations on two devices ----------------------------------------- */

/* Every figure equals the sum over the snapshot. Peaks are the highest values that the figures
 * had. */
enum { OPERATIONS = 10000, LIVE = 300, DEVICES = 2, STREAMS = 4 };

static esper_stream streams[DEVICES][STREAMS];
static void *live[LIVE];
static uint64_t state = 1;

DRAW_FROM(state)

static void begin_on_two_devices(void)
{
  begin_on((sim_options){.devices = DEVICES, .capacity = 2048 * MIB, .completion = SIM_WHEN_TOLD},
           &(esper_config){.max_split_size = 64 * MIB});
  for (int d = 0; d < DEVICES; d++)
    for (int i = 0; i < STREAMS; i++)
      streams[d][i] = world_stream(&w, d);
}

typedef struct sums {
  int64_t allocation[ESPER_CLASSES], segment[ESPER_CLASSES], active[ESPER_CLASSES],
      split[ESPER_CLASSES], allocated[ESPER_CLASSES], reserved[ESPER_CLASSES],
      active_bytes[ESPER_CLASSES], split_bytes[ESPER_CLASSES], requested[ESPER_CLASSES];
  int64_t oversize_blocks, oversize_segments;
} sums;

static void add(int64_t sum[ESPER_CLASSES], int class, size_t amount)
{
  sum[ESPER_ALL] += (int64_t)amount;
  sum[class] += (int64_t)amount;
}

static sums sums_of(int device)
{
  sums sum = {0};
  esper_snapshot snapshot;
  CHECK_OK(esper_snapshot_take(w.core, device, &snapshot));
  for (size_t i = 0; i < snapshot.segment_count; i++) {
    const esper_segment_entry *segment = &snapshot.segments[i];
    int class = segment->large ? ESPER_LARGE : ESPER_SMALL;
    add(sum.segment, class, 1);
    add(sum.reserved, class, segment->size);
    sum.oversize_segments += segment->size >= 64 * MIB;
    for (size_t j = 0; j < segment->block_count; j++) {
      const esper_block_entry *b = &snapshot.blocks[segment->first_block + j];
      if (b->state == ESPER_BLOCK_ALLOCATED) {
        add(sum.allocation, class, 1);
        add(sum.allocated, class, b->size);
        sum.oversize_blocks += b->size >= 64 * MIB;
      }
      if (b->state != ESPER_BLOCK_INACTIVE) {
        add(sum.active, class, 1);
        add(sum.active_bytes, class, b->size);
        add(sum.requested, class, b->requested);
      } else if (segment->block_count > 1) {
        add(sum.split, class, 1);
        add(sum.split_bytes, class, b->size);
      }
    }
  }
  esper_snapshot_free(&snapshot);
  return sum;
}

static void compare(const esper_stat stat[ESPER_CLASSES], const int64_t sum[ESPER_CLASSES])
{
  for (int class = 0; class < ESPER_CLASSES; class++) {
    CHECK_EQ(stat[class].current, sum[class]);
    CHECK(stat[class].peak >= stat[class].current);
    CHECK_EQ(stat[class].allocated - stat[class].freed, stat[class].current);
  }
}

static void check_figures(int device)
{
  esper_stats stats = world_stats(&w, device);
  sums sum = sums_of(device);
  compare(stats.allocation, sum.allocation);
  compare(stats.segment, sum.segment);
  compare(stats.active, sum.active);
  compare(stats.inactive_split, sum.split);
  compare(stats.allocated_bytes, sum.allocated);
  compare(stats.reserved_bytes, sum.reserved);
  compare(stats.active_bytes, sum.active_bytes);
  compare(stats.inactive_split_bytes, sum.split_bytes);
  compare(stats.requested_bytes, sum.requested);
  CHECK_EQ(stats.oversize_allocations.current, sum.oversize_blocks);
  CHECK_EQ(stats.oversize_segments.current, sum.oversize_segments);
  CHECK_EQ(stats.num_device_alloc - stats.num_device_free, sum.segment[ESPER_ALL]);
}

static size_t some_size(void)
{
  switch (draw(8)) {
  case 0: return 1 + draw(512);
  case 1: return MIB + draw(9 * MIB);
  case 2: return 10 * MIB + draw(30 * MIB);
  case 3: return draw(16) ? 4096 : 64 * MIB + draw(40 * MIB);
  default: return 1 + draw(MIB);
  }
}

static void operate(void)
{
  int device = (int)draw(DEVICES), at = (int)draw(LIVE);
  esper_stream reader = streams[draw(DEVICES)][draw(STREAMS)];
  switch (draw(100)) {
  case 0: CHECK_OK(esper_empty_cache(w.core, device, NULL)); break;
  case 1:
  case 2:
  case 3: sim_run_seeded(w.s, state, 200); break;
  case 4: esper_retire(w.core, device); break;
  default:
    if (live[at]) {
      if (draw(3) == 0)
        CHECK_OK(esper_record_use(w.core, (const void *const *)&live[at], 1, reader, 0, NULL));
      if (draw(9) == 0)
        CHECK_OK(esper_record_stream(w.core, live[at], reader));
      CHECK_OK(esper_free(w.core, live[at]));
      live[at] = NULL;
    } else if (esper_malloc(w.core, some_size(), streams[device][draw(STREAMS)], &live[at]) !=
               ESPER_OK) {
      live[at] = NULL; /* it ran out: fine, the figures hold all the same */
    }
  }
}

SCENE_WITH(statistics_are_the_sums_over_the_snapshot, begin_on_two_devices())
{
  int64_t peak[DEVICES][2] = {{0}};
  for (int i = 0; i < OPERATIONS; i++) {
    operate();
    for (int d = 0; d < DEVICES; d++) {
      esper_stats stats = world_stats(&w, d);
      int64_t now[2] = {stats.allocated_bytes[ESPER_ALL].current,
                        stats.allocation[ESPER_ALL].current};
      for (int k = 0; k < 2; k++)
        if (now[k] > peak[d][k])
          peak[d][k] = now[k];
      /* Nothing is freed inside a malloc: these two rise and fall by whole calls. */
      CHECK_EQ(stats.allocated_bytes[ESPER_ALL].peak, peak[d][0]);
      CHECK_EQ(stats.allocation[ESPER_ALL].peak, peak[d][1]);
      if (i % 50 == 0)
        check_figures(d);
      if (i % 2500 == 2499) {
        CHECK_OK(esper_reset_peak_stats(w.core, d));
        peak[d][0] = now[0];
        peak[d][1] = now[1];
        stats = world_stats(&w, d);
        CHECK_EQ(stats.reserved_bytes[ESPER_ALL].peak, stats.reserved_bytes[ESPER_ALL].current);
        CHECK_EQ(stats.inactive_split[ESPER_SMALL].peak, stats.inactive_split[ESPER_SMALL].current);
      }
    }
  }
  for (int d = 0; d < DEVICES; d++)
    check_figures(d);
  for (int i = 0; i < LIVE; i++)
    CHECK_OK(esper_free(w.core, live[i]));
  for (int d = 0; d < DEVICES; d++) {
    CHECK_OK(esper_empty_cache(w.core, d, NULL));
    check_figures(d);
    CHECK_EQ(world_stats(&w, d).reserved_bytes[ESPER_ALL].current, 0);
    CHECK_EQ(world_stats(&w, d).active_bytes[ESPER_ALL].current, 0);
    CHECK_OK(esper_reset_accumulated_stats(w.core, d));
    esper_stats stats = world_stats(&w, d);
    CHECK_EQ(stats.allocation[ESPER_ALL].allocated + stats.allocation[ESPER_ALL].freed, 0);
    CHECK_EQ(stats.num_device_alloc + stats.num_device_free, 0);
  }
}
