/* statistics.c: the public functions of statistics, counters and limits. */
#include <stdlib.h>

#include "../base/call.h"
#include "../base/config.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "../blocks/free_blocks.h"
#include "../blocks/map.h"
#include "../blocks/use.h"
#include "../order/device.h"
#include "../requests/hold_back.h"
#include "../pools/pool.h"
#include "../stats/stat.h"
#include "../stats/stats.h"

esper_status esper_get_stats(esper_core *core, int device_index, esper_stats *stats)
{
  device_t *device;
  *stats = (esper_stats){0};
  esper_status status = core_used_device(core, device_index, &device);
  if (status != ESPER_OK)
    return status;
  if (device) {
    pools_retire(device);
    lock(&device->lock);
    shards_collect(device);
    *stats = device->stats;
    unlock(&device->lock);
  }
  size_t max_split = config_of(core)->max_split_size;
  stats->max_split_size = max_split == SIZE_MAX ? -1 : (int64_t)max_split;
  return ESPER_OK;
}

esper_status esper_reset_peak_stats(esper_core *core, int device_index)
{
  device_t *device;
  esper_status status = core_used_device(core, device_index, &device);
  if (!device)
    return status;
  pools_retire(device);
  lock(&device->lock);
  caches_pause(device);
  shards_read(device);
  stats_reset_peaks(&device->stats);
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    for (int class = 0; class < ESPER_CLASSES; class++)
      stat_reset_peak(&pool->reserved_bytes[class]);
  device->counters.bytes_asleep_peak = device->counters.bytes_asleep;
  caches_resume(device);
  unlock(&device->lock);
  return ESPER_OK;
}

esper_status esper_reset_accumulated_stats(esper_core *core, int device_index)
{
  device_t *device;
  esper_status status = core_used_device(core, device_index, &device);
  if (!device)
    return status;
  lock(&device->lock);
  shards_collect(device);
  stats_reset_accumulated(&device->stats);
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    for (int class = 0; class < ESPER_CLASSES; class++)
      stat_reset_accumulated(&pool->reserved_bytes[class]);
  unlock(&device->lock);
  return ESPER_OK;
}

static void count_pending(const heap_t *heap, esper_counters *counters)
{
  for (const block_t *b = heap->oldest_pending; b; b = b->newer) {
    bool held = false;
    for (const use_t *use = b->uses; use; use = use->next)
      held |= use_is_held(use);
    counters->bytes_pending += b->size;
    counters->blocks_held += held;
  }
}

esper_status esper_get_counters(esper_core *core, int device_index, esper_counters *counters)
{
  device_t *device;
  size_t allowance = allowance_given(core);
  *counters = (esper_counters){.allowance = allowance == SIZE_MAX ? 0 : allowance};
  esper_status status = core_used_device(core, device_index, &device);
  if (!device)
    return status;
  pools_retire(device);
  lock(&device->lock);
  *counters = device->counters;
  for (const heap_t *heap = device->heaps; heap; heap = heap->next_on_device) {
    count_pending(heap, counters);
    if (allowance_of(heap) > allowance)
      allowance = allowance_of(heap);
  }
  counters->allowance = allowance == SIZE_MAX ? 0 : allowance;
  counters->uses_pending = device->uses.live;
  counters->metadata_bytes = arena_used_bytes(&device->blocks) +
                             arena_used_bytes(&device->segments) + arena_used_bytes(&device->uses) +
                             map_bytes(core->map);
  unlock(&device->lock);
  lock(&device->events_lock);
  counters->metadata_bytes += arena_used_bytes(&device->records);
  counters->events_alive = device->events_alive;
  counters->events_created = device->events_created;
  unlock(&device->events_lock);
  return ESPER_OK;
}

const char *esper_driver_call_name(int call)
{
  static const char *const names[] = {
#define CALL_NAME(name, parameters, arguments) #name,
      ESPER_DRIVER_FUNCTIONS(CALL_NAME)
#undef CALL_NAME
  };
  return call >= 0 && call < CALL_COUNT ? names[call] : NULL;
}

uint64_t esper_driver_calls(const esper_core *core, int call)
{
  if (call < 0 || call >= CALL_COUNT)
    return 0;
  uint64_t calls = atomic_load_explicit(&core->driver_calls[call], memory_order_relaxed);
  for (int i = 0; call == CALL_stream_capture && i < core->device_count; i++)
    calls += caches_queries(&core->devices[i]);
  return calls;
}

/* ---- limits ----------------------------------------------------------------- */

esper_status esper_memory_info(esper_core *core, int device_index, size_t *free, size_t *total)
{
  device_t *device;
  esper_status status = core_device(core, device_index, &device);
  if (status == ESPER_OK) {
    status = call_memory_info(core, device_index, free, total);
    if (status != ESPER_OK)
      error_from_driver(core, status);
  }
  return status;
}

static size_t largest_cached(const device_t *device)
{
  size_t largest = 0;
  for (const heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    for (int large = 0; large < 2; large++) {
      const block_t *block = bins_largest(&heap->ready[large]);
      if (block && block->size > largest)
        largest = block->size;
    }
  return largest;
}

esper_status esper_largest_available(esper_core *core, int device_index, size_t *bytes)
{
  size_t free = 0, total = 0;
  *bytes = 0;
  esper_status status = esper_memory_info(core, device_index, &free, &total);
  if (status != ESPER_OK)
    return status;
  device_t *device = &core->devices[device_index];
  pools_retire(device);
  lock(&device->lock);
  size_t reserved = (size_t)device->stats.reserved_bytes[ESPER_ALL].current + device->reserving;
  size_t allowed = reserved < device->limit ? device->limit - reserved : 0;
  if (free > allowed)
    free = allowed;
  caches_close(device);
  size_t cached = largest_cached(device);
  *bytes = cached > free ? cached : free;
  unlock(&device->lock);
  return ESPER_OK;
}

esper_status esper_set_memory_fraction(esper_core *core, int device_index, double fraction)
{
  device_t *device;
  if (!(fraction >= 0 && fraction <= 1))
    return error_set(ESPER_INVALID, "memory fraction is %g: use a number from 0 to 1", fraction);
  lock(&core->config_lock); /* another thread may be setting the device up */
  esper_status status = core_used_device(core, device_index, &device);
  if (status == ESPER_OK && device) {
    status = device_set_limit(device, fraction);
  } else if (status == ESPER_OK) {
    device = &core->devices[device_index];
    lock(&device->lock);
    device->fraction = fraction; /* the limit is set when the device is first used */
    unlock(&device->lock);
  }
  unlock(&core->config_lock);
  return status;
}

double esper_get_memory_fraction(const esper_core *core, int device_index)
{
  if (device_index < 0 || device_index >= core->device_count)
    return 1;
  device_t *device = &core->devices[device_index];
  lock(&device->lock);
  double fraction = device->fraction;
  unlock(&device->lock);
  return fraction;
}
