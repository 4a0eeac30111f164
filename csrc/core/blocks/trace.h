/* trace.h: notes the actions of a device in its ring (trace_ring.h), and tells the watcher. Under
 * the device's lock. */
#ifndef ESPER_TRACE_H
#define ESPER_TRACE_H

#include "block.h"

void trace_append(device_t *device, esper_action action, uintptr_t address, size_t size,
                  const stream_t *stream);

/* Whether the ring or a watcher is on. */
static inline bool trace_is_wanted(const device_t *device)
{
  return device->trace.entries || device->trace.watch;
}

/* Notes an action, if that is wanted. */
static inline void trace_add(device_t *device, esper_action action, uintptr_t address, size_t size,
                             const stream_t *stream)
{
  if (trace_is_wanted(device))
    trace_append(device, action, address, size, stream);
}

/* As trace_add, for a block, with the stream that it was last handed out on. */
static inline void trace_add_block(device_t *device, esper_action action, const block_t *block,
                                   size_t size)
{
  if (trace_is_wanted(device))
    trace_append(device, action, block->address, size, block_user(block));
}

#endif
