/* From an address to the live block around it. */
#include "core/blocks/find.h"

#include "core/blocks/map.h"
#include "heap_world.h"

static bool is_locked(int device)
{
  return atomic_load(&w.core->devices[device].lock.state) != LOCK_FREE;
}

/* The first address of the live block around `at`; NULL: there is none. Checks the locks. */
static void *around(const void *at)
{
  const block_t *block = find_lock_live(w.core, at);
  for (int d = 0; d < esper_device_count(w.core); d++)
    CHECK_EQ(is_locked(d), block && block->segment->device->index == d);
  if (!block)
    return NULL;
  CHECK_EQ(block->state, BLOCK_LIVE);
  unlock(&block->segment->device->lock);
  return (void *)block->address;
}

SCENE_WITH(the_lock_is_that_of_the_blocks_device,
           begin_on((sim_options){.devices = 2, .completion = SIM_AT_ONCE}, NULL))
{
  void *near = world_malloc(&w, 512, r), *far = world_malloc(&w, 512, world_stream(&w, 1));
  CHECK(around(near) == near);
  CHECK(around(far) == far);
  const block_t *block = find_lock_live(w.core, far);
  CHECK(block && block->segment->device->index == 1);
  CHECK(is_locked(1) && !is_locked(0));
  unlock(&w.core->devices[1].lock);
}
