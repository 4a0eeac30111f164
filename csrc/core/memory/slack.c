#include "slack.h"

#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "../pools/pool.h"
#include "../stats/stat_shard.h"
#include "segment.h"

/* So many pages move first; then such a part of the others is room. */
enum { FEW_MOVES = 256, ROOM_SHARE = 25 };

static size_t least(size_t a, size_t b)
{
  return a < b ? a : b;
}

/* Of the pool that lends. */
static bool may_lend_pages(const segment_t *s)
{
  return s->pages && s->heap->pool == s->device->default_pool;
}

static size_t bytes_of_pages(const device_t *device)
{
  size_t bytes = 0;
  for (const segment_t *s = device->first_segment; s; s = s->next)
    if (may_lend_pages(s))
      bytes += s->bytes;
  return bytes;
}

/* That nobody uses, of segments whose pages nobody is lent. */
static size_t free_elsewhere(const device_t *device)
{
  size_t bytes = 0;
  for (const segment_t *s = device->first_segment; s; s = s->next)
    for (const block_t *b = may_lend_pages(s) ? NULL : s->first; b; b = b->next)
      if (block_is_mapped(b) && !b->counted_active)
        bytes += b->size;
  return bytes;
}

/* That nobody uses, of those whose pages are lent. */
static size_t free_bytes(device_t *device)
{
  const esper_stats *stats = &device->stats;
  caches_pause(device);
  shards_read(device);
  size_t bytes =
      (size_t)(stats->reserved_bytes[ESPER_ALL].current - stats->active_bytes[ESPER_ALL].current);
  bytes -= least(bytes, free_elsewhere(device));
  shards_grant(device, NULL);
  caches_resume(device);
  return bytes;
}

static bool fits(const device_t *device, size_t spared)
{
  size_t used = device->room_used, pages = bytes_of_pages(device);
  return used + spared <= (pages - least(pages, used)) / ROOM_SHARE;
}

bool room_take(device_t *device, size_t missing, size_t spared)
{
  size_t peak = (size_t)device->stats.active_bytes[ESPER_ALL].peak;
  size_t then = bytes_of_pages(device) + device->reserving + missing;
  bool allowed = spared && device->counters.pages_moved - device->room_ran_out >= FEW_MOVES &&
                 then <= peak + peak / ROOM_SHARE && segment_may_come(device, missing);
  /* What was made for room and is in use now, like all the rest, had to be made. */
  if (device->room_used && (!spared || (allowed && !fits(device, spared))))
    device->room_used = least(device->room_used, free_bytes(device));
  allowed = allowed && fits(device, spared);
  if (allowed)
    device->room_used += spared;
  return allowed;
}

void room_leave(device_t *device, size_t spared)
{
  device->room_used -= least(device->room_used, spared);
}

void room_ran_out(device_t *device)
{
  device->room_ran_out = device->counters.pages_moved;
}

void room_give_back(const pool_t *pool, size_t bytes)
{
  if (pool == pool->device->default_pool)
    room_leave(pool->device, bytes);
}

bool room_is_valid(const device_t *device)
{
  uint64_t moved = device->counters.pages_moved;
  return device->room_ran_out <= moved && (!device->room_used || moved >= FEW_MOVES);
}
