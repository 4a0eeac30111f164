/* The settings that tests and replays make. */
#include "core/api/testing.h"

#include "check.h"
#include "core/order/device.h"
#include "world.h"

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
