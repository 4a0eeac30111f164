#include "trace.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "heap.h"
#include "map.h"

/* The id of the pool around the address. ESPER_TRACE_OOM has no address, and so no pool. */
static const uint64_t *pool_around(const device_t *device, esper_action action, uintptr_t address)
{
  static const uint64_t none[2];
  const segment_t *segment =
      action == ESPER_TRACE_OOM ? NULL : map_find_segment(device->core->map, address);
  return segment ? segment->heap->pool_id : none;
}

void trace_tell(device_t *device, esper_action action, uintptr_t address, size_t size,
                const stream_t *stream)
{
  const uint64_t *pool = pool_around(device, action, address);
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  esper_trace_entry entry = {
      .action = action,
      .device = device->index,
      .address = address,
      .size = size,
      .stream = stream ? stream->handle : NULL,
      .pool = {pool[0], pool[1]},
      .time_us = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000,
  };
  device->watch(device->watch_context, &entry);
}
