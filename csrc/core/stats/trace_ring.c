#include "trace_ring.h"

#include <stdlib.h>

bool trace_init(trace_t *trace, size_t capacity)
{
  /* The ring starts small, because callers ask for a huge one when they want everything. */
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

/* The ring can grow only before it wraps for the first time. */
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

void trace_keep(trace_t *trace, const esper_trace_entry *entry)
{
  if (trace->count == trace->capacity && trace->capacity < trace->limit)
    trace_grow(trace);
  trace->entries[trace->count++ % trace->capacity] = *entry;
}
