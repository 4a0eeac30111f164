/* One statistic. */
#include "core/stats/stat.h"

#include "one_world.h"

TEST(it_keeps_its_peak_and_its_sums)
{
  esper_stat stat = {0};
  stat_add(&stat, 5);
  stat_sub(&stat, 3);
  stat_add(&stat, 1);
  check_stat(stat, 3, 5, 6, 3);
}

TEST(a_peak_is_raised_to_the_current_value)
{
  esper_stat stat = {.current = 7, .peak = 4};
  stat_raise_peak(&stat);
  CHECK_EQ(stat.peak, 7);
}

TEST(peaks_and_sums_are_reset_apart)
{
  esper_stat stat = {0};
  stat_add(&stat, 9);
  stat_sub(&stat, 7);
  stat_reset_peak(&stat);
  check_stat(stat, 2, 2, 9, 7);
  stat_reset_accumulated(&stat);
  check_stat(stat, 2, 2, 0, 0);
}
