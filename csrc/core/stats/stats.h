/* stats.h: the figures of torch.cuda.memory_stats(), under the device's lock. Those of blocks are
 * exact once all statistics shards were read (stat_shard.h). */
#ifndef ESPER_STATS_H
#define ESPER_STATS_H

#include "../base/types.h"

/* Raises the peaks of the figures of blocks, after all shards were read. */
void stats_raise_peaks(esper_stats *stats);

/* A free block that is a part of its segment enters or leaves its bin. */
void stats_split_added(esper_stats *stats, bool large, size_t size);
void stats_split_removed(esper_stats *stats, bool large, size_t size);

/* A classic segment comes or goes; `of_pool`: its pool's reserved_bytes. */
typedef struct segment_size {
  size_t bytes;
  bool large, oversize;
} segment_size_t;
void stats_segment_added(esper_stats *stats, esper_stat *of_pool, segment_size_t segment);
void stats_segment_removed(esper_stats *stats, esper_stat *of_pool, segment_size_t segment);

/* Pages came to a mapped segment, or left it. `stretches` is the change in the number of its
 * stretches: -1, 0 or 1. */
void stats_pages_added(esper_stats *stats, esper_stat *of_pool, bool large, size_t bytes,
                       int stretches);
void stats_pages_removed(esper_stats *stats, esper_stat *of_pool, bool large, size_t bytes,
                         int stretches);

/* Pages of a mapped segment went to sleep, or woke. */
void stats_pages_slept(esper_stats *stats, esper_stat *of_pool, bool large, size_t bytes);
void stats_pages_woke(esper_stats *stats, esper_stat *of_pool, bool large, size_t bytes);

/* What happens to stretches between these two calls, under one lock, raises no peak; only where
 * they end does. */
typedef struct stretch_peaks {
  int64_t peak[ESPER_CLASSES];
} stretch_peaks_t;
stretch_peaks_t stats_stretches_begin(const esper_stats *stats);
void stats_stretches_end(esper_stats *stats, stretch_peaks_t before);

void stats_reset_peaks(esper_stats *stats);
void stats_reset_accumulated(esper_stats *stats);

#endif
