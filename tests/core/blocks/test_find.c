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

static void *looked_up;

static void give_back_and_take(void)
{
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  looked_up = world_malloc(&w, 12 * MIB, r);
}

static void (*before_locking)(void);
static void lock_late(mutex_t *mutex)
{
  before_locking();
  lock(mutex);
}
#define find_lock_live find_lock_live_late
#define lock(mutex) lock_late(mutex)
#include "../../../csrc/core/blocks/find.c"
#undef lock
#undef find_lock_live

/* Before the lock is held, the segment goes back, and another one takes its place. */
SCENE(a_block_elsewhere_is_none)
{
  before_locking = give_back_and_take;
  char *gone = world_malloc(&w, 60 * MIB, r);
  world_free(&w, gone);
  const block_t *block = find_lock_live_late(w.core, gone + 20 * MIB);
  CHECK(!block || (void *)block->address != looked_up);
  if (block)
    unlock(&block->segment->device->lock);
}
