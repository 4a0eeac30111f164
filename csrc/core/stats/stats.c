#include "stats.h"

#include "stat.h"

static int class_of(bool large)
{
  return large ? ESPER_LARGE : ESPER_SMALL;
}

/* stat_add or stat_sub. */
typedef void change_t(esper_stat *stat, size_t amount);

static void change(esper_stat stat[ESPER_CLASSES], int class, size_t amount, change_t *by)
{
  by(&stat[ESPER_ALL], amount);
  by(&stat[class], amount);
}

void stats_raise_peaks(esper_stats *s)
{
  for (int class = 0; class < ESPER_CLASSES; class++) {
    stat_raise_peak(&s->allocation[class]);
    stat_raise_peak(&s->allocated_bytes[class]);
    stat_raise_peak(&s->active[class]);
    stat_raise_peak(&s->active_bytes[class]);
    stat_raise_peak(&s->requested_bytes[class]);
  }
}

void stats_split_added(esper_stats *s, bool large, size_t size)
{
  int class = class_of(large);
  change(s->inactive_split, class, 1, stat_add);
  change(s->inactive_split_bytes, class, size, stat_add);
}

void stats_split_removed(esper_stats *s, bool large, size_t size)
{
  int class = class_of(large);
  change(s->inactive_split, class, 1, stat_sub);
  change(s->inactive_split_bytes, class, size, stat_sub);
}

static void change_reserved(esper_stats *s, esper_stat *of_pool, bool large, size_t bytes,
                            change_t *by)
{
  change(s->reserved_bytes, class_of(large), bytes, by);
  change(of_pool, class_of(large), bytes, by);
}

static void change_segment(esper_stats *s, esper_stat *of_pool, segment_size_t segment,
                           change_t *by)
{
  change(s->segment, class_of(segment.large), 1, by);
  change_reserved(s, of_pool, segment.large, segment.bytes, by);
  if (segment.oversize)
    by(&s->oversize_segments, 1);
}

void stats_segment_added(esper_stats *s, esper_stat *of_pool, segment_size_t segment)
{
  change_segment(s, of_pool, segment, stat_add);
  s->num_device_alloc++;
}

void stats_segment_removed(esper_stats *s, esper_stat *of_pool, segment_size_t segment)
{
  change_segment(s, of_pool, segment, stat_sub);
  s->num_device_free++;
}

/* A mapped segment counts as one segment for each stretch of its addresses that has memory, and
 * snapshots show it so. */
static void count_stretches(esper_stats *s, bool large, int stretches)
{
  if (stretches)
    change(s->segment, class_of(large), 1, stretches > 0 ? stat_add : stat_sub);
}

void stats_pages_added(esper_stats *s, esper_stat *of_pool, bool large, size_t bytes, int stretches)
{
  count_stretches(s, large, stretches);
  change_reserved(s, of_pool, large, bytes, stat_add);
  s->num_device_alloc++;
}

void stats_pages_removed(esper_stats *s, esper_stat *of_pool, bool large, size_t bytes,
                         int stretches)
{
  count_stretches(s, large, stretches);
  change_reserved(s, of_pool, large, bytes, stat_sub);
  s->num_device_free++;
}

void stats_pages_slept(esper_stats *s, esper_stat *of_pool, bool large, size_t bytes)
{
  change_reserved(s, of_pool, large, bytes, stat_sub);
}

void stats_pages_woke(esper_stats *s, esper_stat *of_pool, bool large, size_t bytes)
{
  change_reserved(s, of_pool, large, bytes, stat_add);
}

stretch_peaks_t stats_stretches_begin(const esper_stats *s)
{
  stretch_peaks_t before;
  for (int class = 0; class < ESPER_CLASSES; class++)
    before.peak[class] = s->segment[class].peak;
  return before;
}

void stats_stretches_end(esper_stats *s, stretch_peaks_t before)
{
  for (int class = 0; class < ESPER_CLASSES; class++) {
    esper_stat *stat = &s->segment[class];
    stat->peak = stat->current > before.peak[class] ? stat->current : before.peak[class];
  }
}

/* The members of esper_stats that are an esper_stat come first. */
enum { STAT_COUNT = offsetof(esper_stats, num_alloc_retries) / sizeof(esper_stat) };

void stats_reset_peaks(esper_stats *stats)
{
  esper_stat *stat = (esper_stat *)stats;
  for (int i = 0; i < STAT_COUNT; i++)
    stat_reset_peak(&stat[i]);
}

void stats_reset_accumulated(esper_stats *stats)
{
  esper_stat *stat = (esper_stat *)stats;
  for (int i = 0; i < STAT_COUNT; i++)
    stat_reset_accumulated(&stat[i]);
  stats->num_alloc_retries = 0;
  stats->num_ooms = 0;
  stats->num_oom_rejections = 0;
  stats->num_sync_all_streams = 0;
  stats->num_device_alloc = 0;
  stats->num_device_free = 0;
}
