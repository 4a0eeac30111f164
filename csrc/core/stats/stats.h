/* stats.h: the figures of torch.cuda.memory_stats(), kept under the device's
 * lock. They are exact when the ledgers were read (ledger.h). */
#ifndef ESPER_STATS_H
#define ESPER_STATS_H

#include "../base/types.h"

/* The peaks of what blocks do, after the ledgers were read (ledger.h). Whether one rose. */
bool stats_raise_peaks(esper_stats *stats);

/* A ready block that is a part of its segment enters or leaves its bin. */
void stats_split_added(esper_stats *stats, bool large, size_t size);
void stats_split_removed(esper_stats *stats, bool large, size_t size);

/* A classic segment, of the pool with that account. */
typedef struct segment_size {
  size_t bytes;
  bool large, oversize;
} segment_size_t;
void stats_segment_added(esper_stats *stats, pool_stats_t *of_pool, segment_size_t segment);
void stats_segment_removed(esper_stats *stats, pool_stats_t *of_pool, segment_size_t segment);
/* It was not removed after all. */
void stats_segment_kept(esper_stats *stats, pool_stats_t *of_pool, segment_size_t segment);

/* Pages came to a mapped segment, or left it, which is in so many more stretches
 * now. */
void stats_pages_added(esper_stats *stats, pool_stats_t *of_pool, bool large, size_t bytes,
                       int stretches);
void stats_pages_removed(esper_stats *stats, pool_stats_t *of_pool, bool large, size_t bytes,
                         int stretches);

/* Between the two calls, under one lock, stretches come and go on the way to where they
 * are at the end: nobody sees that, and no peak does. */
typedef struct stretch_peaks {
  int64_t peak[ESPER_CLASSES];
} stretch_peaks_t;
stretch_peaks_t stats_stretches_begin(const esper_stats *stats);
void stats_stretches_end(esper_stats *stats, stretch_peaks_t before);

void stats_reset_peaks(esper_stats *stats);
void stats_reset_accumulated(esper_stats *stats);

#endif
