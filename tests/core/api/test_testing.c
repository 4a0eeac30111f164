/* The settings that tests and replays make. */
#include "core/api/testing.h"

#include "core/order/device.h"
#include "one_world.h"

SCENE_WITH(the_number_of_moved_pages_is_set_on_each_device,
           begin_on((sim_options){.devices = 2}, NULL))
{
  world_free(&w, world_malloc(&w, MIB, r));
  core_set_pages_moved(w.core, 7);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 7);
  for (int d = 0; d < 2; d++)
    CHECK_EQ(w.core->devices[d].counters.pages_moved, 7);
}
