/* The check of all structures: a core at work passes it, and one broken figure or link anywhere
 * does not. What each structure's own check notices is tested with that structure. */
#include "core/blocks/block_cache.h"
#include "core/blocks/map.h"
#include "core/order/capture.h"
#include "core/order/record.h"
#include "core/pools/pool.h"
#include "one_world.h"

static device_t *device;

/* A core with memory of each kind: live, cached, pending, in a private pool and in a graph. */
static void begin(void)
{
  begin_on((sim_options){.devices = 2, .completion = SIM_WHEN_TOLD}, NULL);
  device = &w.core->devices[0];
  world_malloc_from(&w, world_pool(&w, 0, 7, 0), 12 * MIB, r);
  void *live = world_malloc(&w, 6 * MIB, r), *pending = world_malloc(&w, 6 * MIB, r);
  world_use(&w, live, s, 0);
  world_use(&w, pending, s, 0);
  world_free(&w, pending);
  world_free(&w, world_malloc(&w, 512, r));
  CHECK(esper_core_is_valid(w.core));
}

/* The check fails while the integer differs by one. */
#define CHECK_NOTICED(integer)           \
  do {                                   \
    (integer)++;                         \
    CHECK(!esper_core_is_valid(w.core)); \
    (integer)--;                         \
    CHECK(esper_core_is_valid(w.core));  \
  } while (0)

SCENE(a_pools_figures_that_are_not_those_of_its_segments_are_noticed)
{
  for (pool_t *pool = device->pools; pool; pool = pool->next) {
    CHECK_NOTICED(pool->reserved_bytes[ESPER_ALL].current);
    CHECK_NOTICED(pool->reserved_bytes[ESPER_LARGE].current);
  }
}

SCENE(a_broken_segment_is_noticed)
{
  for (segment_t *segment = device->first_segment; segment; segment = segment->next) {
    CHECK_NOTICED(segment->bytes);
    for (block_t *block = segment->first; block; block = block->next) {
      CHECK_NOTICED(block->size);
      if (block->next) {
        block->next->prev = NULL;
        CHECK(!esper_core_is_valid(w.core));
        block->next->prev = block;
      }
    }
  }
}

SCENE(a_broken_pool_or_heap_is_noticed)
{
  for (pool_t *pool = device->pools; pool; pool = pool->next) {
    int references = pool->references;
    pool->references = -1;
    CHECK(!esper_core_is_valid(w.core));
    pool->references = references;
    for (heap_t *heap = pool->heaps; heap; heap = heap->next)
      for (int large = 0; large < 2; large++) {
        CHECK_NOTICED(heap->ready[large].count);
        CHECK_NOTICED(heap->pending[large].count);
      }
  }
}

SCENE(a_broken_block_cache_is_noticed_before_it_is_closed)
{
  world_free(&w, world_malloc(&w, 512, r)); /* cached */
  stream_t *stream = stream_immortal(w.core, device, r.handle);
  block_cache_t *cache = &atomic_load(&stream->heap)->cache;
  CHECK(cache->filled);
  cache->units[__builtin_ctz(cache->filled)]++;
  CHECK(!esper_core_is_valid(w.core));
  CHECK(!cache->filled); /* the check closed it, so the mistake is gone */
}

SCENE(credit_beyond_the_peaks_is_noticed)
{
  void *p = world_malloc(&w, 512, r);
  stream_t *stream = stream_immortal(w.core, device, r.handle);
  stat_shard_t *shard = &atomic_load(&stream->heap)->cache.shard;
  amounts_t granted = shard->granted[ESPER_ALL];
  shard->granted[ESPER_ALL].bytes += (int64_t)MIB * 1000;
  CHECK(!esper_core_is_valid(w.core)); /* found before the shards are read */
  shard->granted[ESPER_ALL] = granted;
  world_free(&w, p);
}

SCENE(a_broken_stream_is_noticed)
{
  stream_t *stream = stream_immortal(w.core, device, s.handle);
  CHECK(stream->oldest);
  CHECK_NOTICED(stream->outstanding);
  unsigned events = stream->event_count;
  stream->event_count = STREAM_EVENTS + 1;
  CHECK(!esper_core_is_valid(w.core));
  stream->event_count = events;
}

SCENE(a_lost_piece_of_metadata_is_noticed)
{
  CHECK_NOTICED(device->blocks.live);
  CHECK_NOTICED(device->segments.live);
  CHECK_NOTICED(device->uses.live);
  CHECK_NOTICED(device->records.live);
}

SCENE(what_the_device_keeps_beside_its_memory_is_looked_at)
{
  CHECK_NOTICED(device->slack_refused_at); /* after more moves than there were */
}

/* Every device counts. */
SCENE(the_second_device_is_looked_at)
{
  world_malloc(&w, 512, world_stream(&w, 1));
  CHECK_NOTICED(w.core->devices[1].stats.reserved_bytes[ESPER_ALL].current);
}

/* Blocks of no segment, so that nothing else looks at them. */
SCENE(a_block_in_the_wrong_place_of_the_map_is_noticed)
{
  enum { MADE = 8 };
  static block_t made[MADE];
  for (uintptr_t i = 0; i < MADE; i++) {
    made[i] = (block_t){.address = 0x10000000 + i * 4096};
    map_insert(w.core->map, &made[i]);
  }
  CHECK(esper_core_is_valid(w.core));
  for (int i = 0; i < MADE; i++)
    made[i].address += 512;
  CHECK(!esper_core_is_valid(w.core));
  for (int i = 0; i < MADE; i++) {
    made[i].address -= 512;
    map_remove(w.core->map, &made[i]);
  }
}

SCENE(a_broken_capture_is_noticed)
{
  sim_capture_begin(w.s, 0, r.handle);
  world_malloc(&w, 512, r);
  branch_t *branch = NULL;
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    branch = heap->branch ? heap->branch : branch;
  CHECK(branch);
  CHECK_NOTICED(branch->index); /* there is one branch */
  sim_capture_abort(w.s, 0, r.handle);
}
