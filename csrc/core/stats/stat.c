#include "stat.h"

void stat_reset_peak(esper_stat *stat)
{
  stat->peak = stat->current;
}

void stat_reset_accumulated(esper_stat *stat)
{
  stat->allocated = stat->freed = 0;
}
