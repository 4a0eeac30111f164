/* trace.h: the last actions of a device, in a ring kept under its lock. */
#ifndef ESPER_TRACE_H
#define ESPER_TRACE_H

#include "types.h"

bool trace_init(trace_t *trace, size_t capacity); /* false: no host memory    */
void trace_destroy(trace_t *trace);
void trace_clear(trace_t *trace);

void trace_append(device_t *device, esper_action action, uintptr_t address,
                  size_t size, const stream_t *stream);

void trace_watch(trace_t *trace, esper_trace_watch_fn *watch, void *context);

/* Whether anybody wants to know what happens. */
static inline bool trace_is_wanted(const device_t *device)
{
  return device->trace.entries || device->trace.watch;
}

/* Does nothing when the trace is off and nobody watches. */
static inline void trace_add(device_t *device, esper_action action, uintptr_t address,
                             size_t size, const stream_t *stream)
{
  if (trace_is_wanted(device))
    trace_append(device, action, address, size, stream);
}

#endif
