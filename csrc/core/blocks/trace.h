/* trace.h: tells the watcher and the recorder of the actions of a device. Under its lock. */
#ifndef ESPER_TRACE_H
#define ESPER_TRACE_H

#include "block.h"

/* The watcher must be there. */
void trace_tell(device_t *device, esper_action action, uintptr_t address, size_t size,
                const stream_t *stream);
/* Tells the recorder alone, if there is one. */
void trace_record(device_t *device, esper_action action, uintptr_t address, size_t size,
                  const stream_t *stream);

/* Tells of an action, if somebody watches. */
static inline void trace_add(device_t *device, esper_action action, uintptr_t address, size_t size,
                             const stream_t *stream)
{
  if (device->watch)
    trace_tell(device, action, address, size, stream);
}

/* Tells the recorder as well. Not of a malloc or a free, which the caller tells it of. */
static inline void trace_add_memory(device_t *device, esper_action action, uintptr_t address,
                                    size_t size, const stream_t *stream)
{
  trace_add(device, action, address, size, stream);
  trace_record(device, action, address, size, stream);
}

/* As trace_add, for a block, with the stream that it was last handed out on. */
static inline void trace_add_block(device_t *device, esper_action action, const block_t *block,
                                   size_t size)
{
  if (device->watch)
    trace_tell(device, action, block->address, size, block_user(block));
}

#endif
