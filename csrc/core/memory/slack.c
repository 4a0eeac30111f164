#include "slack.h"

#include "../pools/pool.h"
#include "segment.h"

/* MANY_MOVES pages move before new ones are created instead, until 1/SLACK_SHARE of the peak is
 * slack. Small programs may have more: two large pages, or 1/LITTLE_SHARE of the device if that is
 * less. */
enum { MANY_MOVES = 256, SLACK_SHARE = 25, TWO_PAGES = 64 << 20, LITTLE_SHARE = 256 };

bool slack_is_for(const pool_t *pool)
{
  return pool == pool->device->default_pool;
}

/* Bytes of all pages once `missing` bytes are created. */
static size_t pages_with(const device_t *device, size_t missing)
{
  size_t bytes = missing;
  for (const segment_t *s = device->first_segment; s; s = s->next)
    if (s->pages && slack_is_for(s->heap->pool))
      bytes += s->bytes;
  return bytes;
}

/* The peak of active memory since pages last went back. If the statistics' peak is from before
 * that, the highest amount seen whenever pages were missing stands in for it. */
static size_t recent_peak(device_t *device, size_t missing)
{
  size_t peak = (size_t)device->stats.active_bytes[ESPER_ALL].peak;
  shards_collect(device);
  size_t needed = (size_t)device->stats.active_bytes[ESPER_ALL].current + missing;
  if (device->slack_peak < needed)
    device->slack_peak = needed;
  return peak > device->slack_old_peak ? peak : device->slack_peak;
}

static size_t most_slack(const device_t *device, size_t peak)
{
  size_t share = peak / SLACK_SHARE, little = device->total / LITTLE_SHARE;
  size_t least = little < TWO_PAGES ? little : TWO_PAGES;
  return share > least ? share : least;
}

bool slack_allows_new_pages(device_t *device, size_t missing, bool movable)
{
  if (!movable || device->counters.pages_moved - device->slack_refused_at < MANY_MOVES)
    return false;
  size_t peak = recent_peak(device, missing);
  return pages_with(device, missing) <= peak + most_slack(device, peak) &&
         segment_may_come(device, missing);
}

void slack_was_refused(device_t *device)
{
  device->slack_refused_at = device->counters.pages_moved;
}

void slack_begin_anew(const pool_t *pool)
{
  device_t *device = pool->device;
  if (!slack_is_for(pool))
    return;
  device->slack_old_peak = (size_t)device->stats.active_bytes[ESPER_ALL].peak;
  device->slack_peak = 0;
}

bool slack_is_valid(const device_t *device)
{
  return device->slack_refused_at <= device->counters.pages_moved;
}
