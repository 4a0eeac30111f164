#include "slack.h"

#include "../pools/pool.h"
#include "segment.h"

/* FEW_MOVES pages move before there is any slack. Slack is at most 1/SLACK_SHARE of the peak. */
enum { FEW_MOVES = 256, SLACK_SHARE = 25 };

/* Only the default pool lends pages. */
static size_t bytes_of_pages(const device_t *device)
{
  size_t bytes = 0;
  for (const segment_t *s = device->first_segment; s; s = s->next)
    if (s->pages && s->heap->pool == device->default_pool)
      bytes += s->bytes;
  return bytes;
}

static size_t active_bytes(device_t *device)
{
  shards_collect(device);
  return (size_t)device->stats.active_bytes[ESPER_ALL].current;
}

/* The peak of active memory since pages last went back. If the statistics' peak is from before
 * that, the highest amount seen whenever pages were missing stands in for it. */
static size_t recent_peak(device_t *device, size_t missing)
{
  size_t peak = (size_t)device->stats.active_bytes[ESPER_ALL].peak;
  size_t needed = active_bytes(device) + missing;
  if (device->slack_peak < needed)
    device->slack_peak = needed;
  return peak > device->slack_old_peak ? peak : device->slack_peak;
}

bool slack_take(device_t *device, size_t missing, bool lendable)
{
  if (!lendable || device->counters.pages_moved - device->slack_ran_out < FEW_MOVES)
    return false;
  size_t peak = recent_peak(device, missing);
  size_t pages = bytes_of_pages(device) + device->reserving + missing;
  return pages <= peak + peak / SLACK_SHARE && segment_may_come(device, missing);
}

void slack_ran_out(device_t *device)
{
  device->slack_ran_out = device->counters.pages_moved;
}

void slack_given_back(const pool_t *pool)
{
  device_t *device = pool->device;
  if (pool != device->default_pool)
    return;
  device->slack_old_peak = (size_t)device->stats.active_bytes[ESPER_ALL].peak;
  device->slack_peak = 0;
}

bool slack_is_valid(const device_t *device)
{
  uint64_t moved = device->counters.pages_moved;
  return device->slack_ran_out <= moved && (!device->slack_peak || moved >= FEW_MOVES);
}
