#include "stat.h"

void stat_unsub(esper_stat *stat, size_t amount)
{
  stat->current += (int64_t)amount;
  stat->freed -= (int64_t)amount;
  if (stat->current > stat->peak)
    stat->peak = stat->current;
}

void stat_reset_peak(esper_stat *stat)
{
  stat->peak = stat->current;
}

void stat_reset_accumulated(esper_stat *stat)
{
  stat->allocated = stat->freed = 0;
}
