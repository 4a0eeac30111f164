#include "stats.h"

#include "pool_stats.h"
#include "stat.h"

static int class_of(bool large)
{
  return large ? ESPER_LARGE : ESPER_SMALL;
}

static void class_add(esper_stat stat[ESPER_CLASSES], int class, size_t amount)
{
  stat_add(&stat[ESPER_ALL], amount);
  stat_add(&stat[class], amount);
}

static void class_sub(esper_stat stat[ESPER_CLASSES], int class, size_t amount)
{
  stat_sub(&stat[ESPER_ALL], amount);
  stat_sub(&stat[class], amount);
}

bool stats_raise_peaks(esper_stats *s)
{
  bool raised = false;
  for (int class = 0; class < ESPER_CLASSES; class++) {
    raised |= stat_raise_peak(&s->allocation[class]);
    raised |= stat_raise_peak(&s->allocated_bytes[class]);
    raised |= stat_raise_peak(&s->active[class]);
    raised |= stat_raise_peak(&s->active_bytes[class]);
    raised |= stat_raise_peak(&s->requested_bytes[class]);
  }
  return raised;
}

void stats_split_added(esper_stats *s, bool large, size_t size)
{
  int class = class_of(large);
  class_add(s->inactive_split, class, 1);
  class_add(s->inactive_split_bytes, class, size);
}

void stats_split_removed(esper_stats *s, bool large, size_t size)
{
  int class = class_of(large);
  class_sub(s->inactive_split, class, 1);
  class_sub(s->inactive_split_bytes, class, size);
}

void stats_segment_added(esper_stats *s, pool_stats_t *of_pool, segment_size_t segment)
{
  class_add(s->segment, class_of(segment.large), 1);
  class_add(s->reserved_bytes, class_of(segment.large), segment.bytes);
  pool_stats_add(of_pool, segment.large, segment.bytes);
  if (segment.oversize)
    stat_add(&s->oversize_segments, 1);
  s->num_device_alloc++;
}

void stats_segment_removed(esper_stats *s, pool_stats_t *of_pool, segment_size_t segment)
{
  class_sub(s->segment, class_of(segment.large), 1);
  class_sub(s->reserved_bytes, class_of(segment.large), segment.bytes);
  pool_stats_remove(of_pool, segment.large, segment.bytes);
  if (segment.oversize)
    stat_sub(&s->oversize_segments, 1);
  s->num_device_free++;
}

void stats_segment_kept(esper_stats *s, pool_stats_t *of_pool, segment_size_t segment)
{
  int class = class_of(segment.large);
  stat_unsub(&s->segment[ESPER_ALL], 1);
  stat_unsub(&s->segment[class], 1);
  stat_unsub(&s->reserved_bytes[ESPER_ALL], segment.bytes);
  stat_unsub(&s->reserved_bytes[class], segment.bytes);
  pool_stats_kept(of_pool, segment.large, segment.bytes);
  if (segment.oversize)
    stat_unsub(&s->oversize_segments, 1);
  s->num_device_free--;
}

/* A mapped segment counts as one segment for each stretch of its addresses that has memory, and
 * snapshots show it so. */
static void count_stretches(esper_stats *s, int class, int stretches)
{
  if (stretches > 0)
    class_add(s->segment, class, 1);
  else if (stretches < 0)
    class_sub(s->segment, class, 1);
}

void stats_pages_added(esper_stats *s, pool_stats_t *of_pool, bool large, size_t bytes,
                       int stretches)
{
  count_stretches(s, class_of(large), stretches);
  class_add(s->reserved_bytes, class_of(large), bytes);
  pool_stats_add(of_pool, large, bytes);
  s->num_device_alloc++;
}

void stats_pages_removed(esper_stats *s, pool_stats_t *of_pool, bool large, size_t bytes,
                         int stretches)
{
  count_stretches(s, class_of(large), stretches);
  class_sub(s->reserved_bytes, class_of(large), bytes);
  pool_stats_remove(of_pool, large, bytes);
  s->num_device_free++;
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
