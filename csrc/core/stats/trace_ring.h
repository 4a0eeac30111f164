/* trace_ring.h: the last actions of a device, in a ring that grows up to its limit. */
#ifndef ESPER_TRACE_RING_H
#define ESPER_TRACE_RING_H

#include "../base/types.h"

typedef struct trace {
  esper_trace_entry *entries;  /* the ring; NULL when off */
  size_t capacity, limit;      /* the ring grows up to the limit, then wraps */
  uint64_t count;              /* entries written since the start */
  esper_trace_watch_fn *watch; /* is told of each entry; may be NULL */
  void *watch_context;
} trace_t;

bool trace_init(trace_t *trace, size_t capacity); /* false: no host memory */
void trace_destroy(trace_t *trace);
void trace_clear(trace_t *trace);
void trace_watch(trace_t *trace, esper_trace_watch_fn *watch, void *context);

/* Adds an entry to the ring, which must be on. */
void trace_keep(trace_t *trace, const esper_trace_entry *entry);

#endif
