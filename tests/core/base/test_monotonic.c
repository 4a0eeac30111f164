#include "core/base/monotonic.h"

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
TEST(a_test_can_move_time_on)
{
  const uint64_t hour = 3600000000u;
  uint64_t before = monotonic_now();
  monotonic_skip(hour);
  CHECK(monotonic_now() >= before + hour);
}
