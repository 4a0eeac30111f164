#include "trace.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "map.h"

bool trace_init(trace_t *trace, size_t capacity)
{
  /* The ring starts small: callers ask for "everything" with huge numbers. */
  size_t first = capacity < 1024 ? capacity : 1024;
  trace->entries = calloc(first, sizeof *trace->entries);
  trace->capacity = first;
  trace->limit = capacity;
  trace->count = 0;
  return trace->entries != NULL;
}

void trace_destroy(trace_t *trace)
{
  free(trace->entries);
  trace->entries = NULL;
  trace->capacity = trace->limit = 0;
  trace->count = 0;
}

void trace_clear(trace_t *trace)
{
  trace->count = 0;
}

/* While the ring has never wrapped it may still grow. */
static void trace_grow(trace_t *trace)
{
  size_t capacity = trace->capacity < trace->limit / 2 ? 2 * trace->capacity : trace->limit;
  esper_trace_entry *entries = realloc(trace->entries, capacity * sizeof *entries);
  if (entries) {
    trace->entries = entries;
    trace->capacity = capacity;
  }
}

void trace_watch(trace_t *trace, esper_trace_watch_fn *watch, void *context)
{
  trace->watch = watch;
  trace->watch_context = context;
}

/* An out-of-memory entry has no address, and so no pool. */
static const pool_t *pool_around(const device_t *device, esper_action action, uintptr_t address)
{
  const segment_t *segment =
      action == ESPER_TRACE_OOM ? NULL : map_find_segment(device->core->map, address);
  return segment ? segment->heap->pool : &device->default_pool;
}

static void trace_keep(trace_t *trace, const esper_trace_entry *entry)
{
  if (trace->count == trace->capacity && trace->capacity < trace->limit)
    trace_grow(trace);
  trace->entries[trace->count++ % trace->capacity] = *entry;
}

void trace_append(device_t *device, esper_action action, uintptr_t address, size_t size,
                  const stream_t *stream)
{
  trace_t *trace = &device->trace;
  const pool_t *pool = pool_around(device, action, address);
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  esper_trace_entry entry = {
      .action = action,
      .device = device->index,
      .address = address,
      .size = size,
      .stream = stream ? stream->handle : NULL,
      .pool = {pool->id[0], pool->id[1]},
      .time_us = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000,
  };
  if (trace->entries)
    trace_keep(trace, &entry);
  if (trace->watch)
    trace->watch(trace->watch_context, &entry);
}
