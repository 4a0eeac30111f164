/* Vector clocks. */
#include "audit/clock.h"

#include "check.h"

TEST(an_entry_rises_and_never_falls)
{
  clock_vector clock = {0};
  CHECK_EQ(clock_get(&clock, 9), 0);
  CHECK(clock_raise(&clock, 9, 5) && clock_raise(&clock, 9, 3));
  CHECK_EQ(clock_get(&clock, 9), 5);
  CHECK_EQ(clock_get(&clock, 8), 0);
  clock_clear(&clock);
}

TEST(joining_takes_the_later_of_each)
{
  clock_vector one = {0}, other = {0};
  int changed = 0;
  CHECK(clock_raise(&one, 0, 4) && clock_raise(&other, 0, 2) && clock_raise(&other, 20, 7));
  CHECK(clock_join(&one, &other, &changed) && changed);
  CHECK_EQ(clock_get(&one, 0), 4);
  CHECK_EQ(clock_get(&one, 20), 7);
  changed = 0;
  CHECK(clock_join(&one, &other, &changed) && !changed);
  clock_clear(&one);
  clock_clear(&other);
}

TEST(without_host_memory_nothing_changes)
{
  clock_vector clock = {0};
  CHECK(!WITH_MALLOCS(0, clock_raise(&clock, 3, 1)));
  CHECK(!WITH_MALLOCS(0, clock_copy_make(&clock)));
  CHECK_EQ(clock_get(&clock, 3), 0);
}
