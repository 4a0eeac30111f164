/* stat.h: one statistic: its current value, its peak, and the sums of all that was added and of all
 * that was taken away. */
#ifndef ESPER_STAT_H
#define ESPER_STAT_H

#include "../base/types.h"

static inline void stat_add(esper_stat *stat, size_t amount)
{
  stat->current += (int64_t)amount;
  stat->allocated += (int64_t)amount;
  if (stat->current > stat->peak)
    stat->peak = stat->current;
}

static inline void stat_sub(esper_stat *stat, size_t amount)
{
  stat->current -= (int64_t)amount;
  stat->freed += (int64_t)amount;
}

static inline void stat_raise_peak(esper_stat *stat)
{
  if (stat->current > stat->peak)
    stat->peak = stat->current;
}

void stat_reset_peak(esper_stat *stat);
void stat_reset_accumulated(esper_stat *stat);

#endif
