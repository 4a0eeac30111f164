#include "core/base/monotonic.h"

#include <time.h>

#include "check.h"

TEST(time_never_goes_back)
{
  uint64_t before = monotonic_now();
  for (int i = 0; i < 1000; i++) {
    uint64_t now = monotonic_now();
    CHECK(now >= before);
    before = now;
  }
}

/* An hour, which no test waits for. */
TEST(a_test_can_stop_time_and_move_it_on)
{
  const uint64_t hour = 3600000000u;
  uint64_t before = monotonic_now();
  monotonic_skip(hour);
  uint64_t stopped = monotonic_now();
  CHECK(stopped >= before + hour);
  struct timespec while_longer = {.tv_nsec = 1000000};
  nanosleep(&while_longer, NULL);
  CHECK_EQ(monotonic_now(), stopped);
  monotonic_skip(5);
  CHECK_EQ(monotonic_now(), stopped + 5);
}
