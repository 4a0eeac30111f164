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

TEST(what_is_not_live_is_not_found)
{
  begin();
  char *a = world_malloc(&w, 512, r), *b = world_malloc(&w, 4096, r), *c = world_malloc(&w, 512, r);
  world_use(&w, b, s, 0);
  world_free(&w, a); /* cached */
  world_free(&w, b); /* pending or ready */
  CHECK(!around(a) && !around(a + 511));
  CHECK(!around(b) && !around(b + 5));
  CHECK(around(c + 511) == c);
  CHECK(!around(c + 512)); /* the rest of the segment */
  CHECK(!around(a + 2 * MIB - 1));
  end();
}

TEST(outside_all_segments_nothing_is_found)
{
  begin();
  char *p = world_malloc(&w, 20 * MIB, r), *q = world_malloc(&w, 20 * MIB, r);
  char *low = p < q ? p : q, *high = p < q ? q : p;
  int local;
  CHECK(!around(NULL));
  CHECK(!around(&local));
  CHECK(!around(low - 1));
  CHECK(!around(high + 20 * MIB));
  CHECK(around(low + 20 * MIB) == (high == low + 20 * MIB ? high : NULL));
  world_free(&w, low);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(!around(low)); /* its segment has gone */
  CHECK(around(high) == high);
  end();
}

TEST(the_lock_is_that_of_the_blocks_device)
{
  begin_with((sim_options){.devices = 2, .completion = SIM_AT_ONCE});
  void *near = world_malloc(&w, 512, r), *far = world_malloc(&w, 512, world_stream(&w, 1));
  CHECK(around(near) == near);
  CHECK(around(far) == far);
  const block_t *block = find_lock_live(w.core, far);
  CHECK(block && block->segment->device->index == 1);
  CHECK(is_locked(1) && !is_locked(0));
  unlock(&w.core->devices[1].lock);
  end();
}
