/* The block cache of a heap: malloc and free without the device's lock. */
#include "core/blocks/block_cache.h"

#include "core/blocks/map.h"
#include "heap_world.h"

SCENE(what_was_freed_is_handed_out_again_and_nobody_is_asked)
{
  void *p = world_malloc(&w, 3 * MIB, r);
  world_free(&w, p);
  CHECK_EQ(kept(r), 1);
  device_t *device = &w.core->devices[0];
  for (int i = 0; i < 100; i++) {
    lock(&device->lock); /* which neither call takes */
    CHECK_OK(esper_malloc(w.core, 3 * MIB - 100, r, &p));
    CHECK_OK(esper_free(w.core, p));
    unlock(&device->lock);
  }
  CHECK_EQ(kept(r), 1);
  esper_stats stats = world_stats(&w, 0);
  CHECK_EQ(stats.allocation[ESPER_ALL].allocated, 101);
  CHECK_EQ(stats.allocation[ESPER_ALL].freed, 101);
  CHECK_EQ(stats.allocation[ESPER_ALL].peak, 1);
  CHECK_EQ(stats.requested_bytes[ESPER_LARGE].allocated, 303 * MIB - 10000);
  CHECK_EQ(stats.active_bytes[ESPER_LARGE].peak, 3 * MIB);
}

/* The map is read without a lock: the segment may go before the block is looked at. */
SCENE(freeing_twice_is_an_error_beside_a_release)
{
  void *p = world_malloc(&w, 30 * MIB, r);
  block_t *block = map_find(w.core->map, (uintptr_t)p); /* as far as the second free got */
  world_free(&w, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(!cache_free(block, (uintptr_t)p));
  device_t *device = &w.core->devices[0];
  lock(&device->lock);
  CHECK(!cache_claim_live(block, (uintptr_t)p)); /* as when it waited for the lock */
  unlock(&device->lock);
  CHECK_STATUS(esper_free(w.core, p), ESPER_INVALID);
}

SCENE(a_broken_block_cache_is_noticed)
{
  void *p = world_malloc(&w, MIB, r);
  world_free(&w, p);
  heap_t *heap = heap_of(r);
  block_cache_t *cache = &heap->cache;
  CHECK(cache_is_valid(heap));
  int slot = __builtin_ctz(cache->filled);
  block_t *block = cache->block[slot][0];
  block->counted_active = true;
  CHECK(!cache_is_valid(heap));
  block->counted_active = false;
  cache->units[slot]++;
  CHECK(!cache_is_valid(heap));
  cache->units[slot]--;
  cache->filled = 0;
  CHECK(!cache_is_valid(heap));
  cache->filled = (uint16_t)(1u << slot);
  CHECK(cache_is_valid(heap));
}

/* ---- what it keeps lies on pages ---------------------------------------------- */

/* A hole is filled by what one of its neighbours misses, also if that is in the block cache. */
SCENE_WITH(a_heap_grows_by_what_the_kept_blocks_beside_a_hole_miss, begin_on_pages())
{
  void *p = block(4 * MIB, r), *q = block(4 * MIB, r);
  world_free(&w, q);
  CHECK_EQ(kept(r), 1);
  CHECK(block(20 * MIB, r) == q);
  CHECK_EQ(reserved_mib(), 24);
  world_free(&w, p);
}
