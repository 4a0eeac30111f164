/* validity.c: checks that every structure of a core is as it should be. */
#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "../blocks/free_blocks.h"
#include "../blocks/map.h"
#include "../memory/fence.h"
#include "../memory/mapped.h"
#include "../memory/slack.h"
#include "../order/capture.h"
#include "../order/event.h"
#include "../order/record.h"
#include "../pools/pool.h"

/* Compares the blocks' live, pending and ready bytes with the statistics. */
static bool statistics_are_valid(device_t *device)
{
  int64_t reserved = 0, allocated = 0, active = 0, split = 0, segments = 0;
  for (const segment_t *s = device->first_segment; s; s = s->next) {
    reserved += (int64_t)(s->bytes - s->absent);
    for (const block_t *b = s->first; b; b = b->next) {
      segments += block_is_mapped(b) && !(b->prev && block_is_mapped(b->prev));
      if (b->state == BLOCK_LIVE)
        allocated += (int64_t)b->size;
      if (b->counted_active)
        active += (int64_t)b->size;
      if (block_is_in_bin(b) && block_counts_as_split(b))
        split += (int64_t)b->size;
    }
  }
  const esper_stats *stats = &device->stats;
  return segments == stats->segment[ESPER_ALL].current &&
         reserved == stats->reserved_bytes[ESPER_ALL].current &&
         allocated == stats->allocated_bytes[ESPER_ALL].current &&
         active == stats->active_bytes[ESPER_ALL].current &&
         split == stats->inactive_split_bytes[ESPER_ALL].current;
}

static bool pool_stats_are_valid(const device_t *device)
{
  bool valid = true;
  for (const pool_t *pool = device->pools; pool && valid; pool = pool->next) {
    const esper_stat *reserved = pool->reserved_bytes;
    int64_t bytes = 0;
    for (const segment_t *s = device->first_segment; s; s = s->next)
      if (s->heap->pool == pool)
        bytes += (int64_t)(s->bytes - s->absent);
    valid = reserved[ESPER_ALL].current == bytes &&
            reserved[ESPER_SMALL].current + reserved[ESPER_LARGE].current == bytes;
  }
  return valid;
}

static bool device_is_valid(device_t *device)
{
  bool valid = true;
  lock(&device->lock);
  for (pool_t *pool = device->pools; pool && valid; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap && valid; heap = heap->next)
      valid = cache_is_valid(heap);
  caches_close(device);
  valid = valid && shards_are_valid(device);
  shards_read(device);
  for (segment_t *s = device->first_segment; s && valid; s = s->next)
    valid = segment_is_valid(s);
  for (pool_t *pool = device->pools; pool && valid; pool = pool->next)
    valid = pool_is_valid(pool);
  valid = valid && statistics_are_valid(device) && slack_is_valid(device) &&
          fences_are_valid(device) && pool_stats_are_valid(device);
  valid = valid && arena_is_valid(&device->blocks) && arena_is_valid(&device->segments) &&
          arena_is_valid(&device->uses);
  unlock(&device->lock);
  return valid && records_are_valid(device);
}

int esper_core_is_valid(esper_core *core)
{
  bool valid = map_is_valid(core->map);
  for (int i = 0; i < core->device_count && valid; i++)
    valid = device_is_valid(&core->devices[i]);
  for (stream_t *s = atomic_load(&core->streams); s && valid; s = s->next)
    valid = stream_is_valid(s);
  return valid && capture_is_valid(core);
}
