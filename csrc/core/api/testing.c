#include "testing.h"

#include "../order/device.h"

void core_set_pages_moved(core_t *core, uint64_t pages)
{
  for (int d = 0; d < core->device_count; d++)
    core->devices[d].counters.pages_moved = pages;
}
