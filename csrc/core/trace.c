#include "trace.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

bool trace_init(trace_t *trace, size_t capacity)
{
  /* The ring starts small: callers ask for "everything" with huge numbers. */
  size_t first = capacity < 1024 ? capacity : 1024;
  *trace = (trace_t){.entries = calloc(first, sizeof *trace->entries), .capacity = first,
                     .limit = capacity};
  return trace->entries != NULL;
}

void trace_destroy(trace_t *trace)
{
  free(trace->entries);
  *trace = (trace_t){0};
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

void trace_append(device_t *device, esper_action action, uintptr_t address,
                  size_t size, const stream_t *stream)
{
  trace_t *trace = &device->trace;
  if (trace->count == trace->capacity && trace->capacity < trace->limit)
    trace_grow(trace);
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  trace->entries[trace->count++ % trace->capacity] = (esper_trace_entry){
      .action = action,
      .device = device->index,
      .address = address,
      .size = size,
      .stream = stream ? stream->handle : NULL,
      .time_us = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000,
  };
}
