/* The settings that tests and replays make. */
#include "core/api/testing.h"

#include "check.h"
#include "core/order/device.h"
#include "world.h"

static int64_t fixed_clock(void)
{
  return 42;
}

TEST(a_core_reads_the_clock_that_it_was_given)
{
  world w;
  world_begin(&w);
  int64_t before = w.core->clock_us();
  CHECK(w.core->clock_us() >= before); /* the machine's never falls */
  core_set_clock(w.core, fixed_clock);
  CHECK_EQ(w.core->clock_us(), 42);
  world_end(&w);
}

TEST(the_number_of_moved_pages_is_set_on_each_device)
{
  world w;
  sim_options options = {.devices = 2, .completion = SIM_AT_ONCE};
  world_begin_with(&w, &options, NULL);
  world_free(&w, world_malloc(&w, MIB, w.stream[0]));
  core_set_pages_moved(w.core, 7);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 7);
  for (int d = 0; d < 2; d++)
    CHECK_EQ(w.core->devices[d].counters.pages_moved, 7);
  world_end(&w);
}
