/* Every figure equals the sum over the snapshot, after many random operations on two devices. Peaks
 * are the highest values that the figures had. */
#include "world.h"

enum { OPERATIONS = 10000, LIVE = 300, DEVICES = 2, STREAMS = 4 };

static world w;
static esper_stream streams[DEVICES][STREAMS];
static void *live[LIVE];
static uint64_t state = 88172645463325252u;

static uint64_t draw(uint64_t below)
{
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % below;
}

static void begin(void)
{
  sim_options options = {.devices = DEVICES, .capacity = 2048 * MIB, .completion = SIM_WHEN_TOLD};
  esper_config config = {.max_split_size = 64 * MIB};
  world_begin_with(&w, &options, &config);
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
    const esper_segment_entry *s = &snapshot.segments[i];
    int class = s->large ? ESPER_LARGE : ESPER_SMALL;
    add(sum.segment, class, 1);
    add(sum.reserved, class, s->size);
    sum.oversize_segments += s->size >= 64 * MIB;
    for (size_t j = 0; j < s->block_count; j++) {
      const esper_block_entry *b = &snapshot.blocks[s->first_block + j];
      if (b->state == ESPER_BLOCK_ALLOCATED) {
        add(sum.allocation, class, 1);
        add(sum.allocated, class, b->size);
        sum.oversize_blocks += b->size >= 64 * MIB;
      }
      if (b->state != ESPER_BLOCK_INACTIVE) {
        add(sum.active, class, 1);
        add(sum.active_bytes, class, b->size);
        add(sum.requested, class, b->requested);
      } else if (s->block_count > 1) {
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

TEST(figures_are_the_sums_over_the_snapshot)
{
  begin();
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
  world_end(&w);
}
