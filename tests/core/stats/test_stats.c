/* The figures of memory_stats(): what each event changes, and what programs read. */
#include "core/stats/stats.h"

#include "one_world.h"

BEGIN(WHEN_TOLD)

SCENE(oversize_blocks_are_counted_by_the_limit_of_their_birth)
{
  CHECK_OK(esper_configure(w.core, &(esper_config){.max_split_size = 20 * MIB}));
  void *p = world_malloc(&w, 40 * MIB, r);
  esper_stats now = world_stats(&w, 0);
  CHECK_EQ(now.max_split_size, 20 * MIB);
  check_stat(now.oversize_allocations, 1, 1, 1, 0);
  check_stat(now.oversize_segments, 1, 1, 1, 0);
  CHECK_OK(esper_configure(w.core, NULL));
  world_free(&w, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  now = world_stats(&w, 0);
  CHECK_EQ(now.oversize_allocations.current, 0);
  CHECK_EQ(now.oversize_segments.current, 0);
}

/* ---- asked directly ------------------------------------------------------------- */

static esper_stats stats;

static void clear(void)
{
  memset(&stats, 0, sizeof stats);
}

static esper_stat of_pool[ESPER_CLASSES];

TEST(a_segment_counts_from_its_coming_to_its_going)
{
  clear();
  segment_size_t segment = {.bytes = 20 * MIB, .large = true, .oversize = true};
  stats_segment_added(&stats, of_pool, segment);
  check_stat(stats.segment[ESPER_LARGE], 1, 1, 1, 0);
  check_stat(stats.reserved_bytes[ESPER_ALL], 20 * MIB, 20 * MIB, 20 * MIB, 0);
  check_stat(stats.oversize_segments, 1, 1, 1, 0);
  stats_segment_removed(&stats, of_pool, segment);
  check_stat(stats.segment[ESPER_ALL], 0, 1, 1, 1);
  check_stat(stats.reserved_bytes[ESPER_LARGE], 0, 20 * MIB, 20 * MIB, 20 * MIB);
  check_stat(stats.oversize_segments, 0, 1, 1, 1);
  CHECK_EQ(stats.num_device_alloc, 1);
  CHECK_EQ(stats.num_device_free, 1);
}

TEST(pages_count_by_their_bytes_and_segments_by_their_stretches)
{
  clear();
  stats_pages_added(&stats, of_pool, true, 4 * MIB, 1);
  stats_pages_added(&stats, of_pool, true, 4 * MIB, 0); /* beside the others */
  check_stat(stats.segment[ESPER_LARGE], 1, 1, 1, 0);
  CHECK_EQ(stats.reserved_bytes[ESPER_LARGE].current, 8 * MIB);
  CHECK_EQ(stats.num_device_alloc, 2);
  stats_pages_removed(&stats, of_pool, true, 2 * MIB, 1); /* out of the middle */
  check_stat(stats.segment[ESPER_ALL], 2, 2, 2, 0);
  stats_pages_added(&stats, of_pool, true, 2 * MIB, -1); /* and there again */
  check_stat(stats.segment[ESPER_ALL], 1, 2, 2, 1);
  stats_pages_removed(&stats, of_pool, true, 8 * MIB, -1);
  check_stat(stats.segment[ESPER_ALL], 0, 2, 2, 2);
  check_stat(stats.reserved_bytes[ESPER_ALL], 0, 8 * MIB, 10 * MIB, 10 * MIB);
  CHECK_EQ(stats.num_device_free, 2);
}

TEST(stretches_in_between_raise_no_peak)
{
  clear();
  stats_pages_added(&stats, of_pool, true, 4 * MIB, 1);
  stretch_peaks_t before = stats_stretches_begin(&stats);
  for (int i = 0; i < 5; i++)
    stats_pages_removed(&stats, of_pool, true, 512, 1);
  for (int i = 0; i < 4; i++)
    stats_pages_added(&stats, of_pool, true, 512, -1);
  CHECK_EQ(stats.segment[ESPER_LARGE].peak, 6);
  stats_stretches_end(&stats, before);
  CHECK_EQ(stats.segment[ESPER_LARGE].current, 2);
  CHECK_EQ(stats.segment[ESPER_LARGE].peak, 2); /* where they end */
  CHECK_EQ(stats.segment[ESPER_ALL].peak, 2);
  CHECK_EQ(stats.segment[ESPER_SMALL].peak, 0);
  before = stats_stretches_begin(&stats);
  stats_pages_added(&stats, of_pool, true, 512, -1);
  stats_stretches_end(&stats, before);
  CHECK_EQ(stats.segment[ESPER_ALL].peak, 2);
}

TEST(splits_are_counted_by_size_class)
{
  clear();
  stats_split_added(&stats, true, 3 * MIB);
  stats_split_added(&stats, false, 512);
  stats_split_removed(&stats, true, 3 * MIB);
  check_stat(stats.inactive_split[ESPER_ALL], 1, 2, 2, 1);
  check_stat(stats.inactive_split_bytes[ESPER_LARGE], 0, 3 * MIB, 3 * MIB, 3 * MIB);
  check_stat(stats.inactive_split_bytes[ESPER_SMALL], 512, 512, 512, 0);
}

TEST(peaks_are_raised_to_what_the_shards_added)
{
  clear();
  for (int class = 0; class < ESPER_CLASSES; class++) {
    esper_stat *figures[] = {&stats.allocation[class], &stats.allocated_bytes[class],
                             &stats.active[class], &stats.active_bytes[class],
                             &stats.requested_bytes[class]};
    for (int i = 0; i < 5; i++) {
      figures[i]->current = 7;
      stats_raise_peaks(&stats);
      CHECK_EQ(figures[i]->peak, 7);
      figures[i]->current = 3;
      stats_raise_peaks(&stats);
      CHECK_EQ(figures[i]->peak, 7); /* peaks do not fall */
    }
  }
}

/* All that is an esper_stat, and no more. */
TEST(a_reset_reaches_every_figure)
{
  clear();
  enum { COUNT = offsetof(esper_stats, num_alloc_retries) / sizeof(esper_stat) };
  esper_stat *figure = (esper_stat *)&stats;
  for (int i = 0; i < COUNT; i++)
    figure[i] = (esper_stat){.current = i, .peak = i + 5, .allocated = i + 9, .freed = 9};
  stats.num_ooms = stats.num_alloc_retries = stats.num_device_alloc = 4;
  stats.max_split_size = -1;
  stats_reset_peaks(&stats);
  for (int i = 0; i < COUNT; i++)
    check_stat(figure[i], i, i, i + 9, 9);
  CHECK_EQ(stats.num_ooms, 4);
  stats_reset_accumulated(&stats);
  for (int i = 0; i < COUNT; i++)
    check_stat(figure[i], i, i, 0, 0);
  CHECK_EQ(stats.num_ooms + stats.num_alloc_retries + stats.num_device_alloc, 0);
  CHECK_EQ(stats.max_split_size, -1);
}
