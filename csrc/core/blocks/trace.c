#include "trace.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "heap.h"
#include "map.h"

/* The id of the pool around the address. */
static const uint64_t *pool_around(const device_t *device, esper_action action, uintptr_t address)
{
  static const uint64_t none[2];
  bool has_address = action != ESPER_TRACE_OOM && action != ESPER_TRACE_HELD_BACK;
  const segment_t *segment = has_address ? map_find_segment(device->core->map, address) : NULL;
  return segment ? segment->heap->pool_id : none;
}

static esper_trace_entry entry_of(const device_t *device, esper_action action, uintptr_t address,
                                  size_t size, const stream_t *stream)
{
  const uint64_t *pool = pool_around(device, action, address);
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (esper_trace_entry){
      .action = action,
      .device = device->index,
      .address = address,
      .size = size,
      .stream = stream ? stream->handle : NULL,
      .pool = {pool[0], pool[1]},
      .time_us = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000,
  };
}

void trace_tell(device_t *device, esper_action action, uintptr_t address, size_t size,
                const stream_t *stream)
{
  esper_trace_entry entry = entry_of(device, action, address, size, stream);
  device->watch(device->watch_context, &entry);
}

void trace_record(device_t *device, esper_action action, uintptr_t address, size_t size,
                  const stream_t *stream)
{
  const esper_recorder *recorder =
      atomic_load_explicit(&device->core->recorder, memory_order_acquire);
  if (!recorder)
    return;
  esper_trace_entry entry = entry_of(device, action, address, size, stream);
  recorder->told(&entry);
}
