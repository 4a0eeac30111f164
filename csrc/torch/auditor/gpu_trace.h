// What PyTorch tells a tracer of the GPU: allocations and frees, events, waits and synchronisation.
// PyTorch has one tracer, which is Python code. This one runs no Python, and passes everything on
// to the one that was there before.
#pragma once

#include <cstdint>

namespace esper
{

// Streams and events by their handles, on the current device.
struct GpuTraceListener {
  void (*event_recorded)(uintptr_t event, uintptr_t stream);
  void (*event_waited_for)(uintptr_t event, uintptr_t stream);
  void (*event_destroyed)(uintptr_t event);
  void (*event_synchronized)(uintptr_t event);
  void (*stream_synchronized)(uintptr_t stream);
  void (*device_synchronized)();
  void (*memory_allocated)(uintptr_t address);
  void (*memory_freed)(uintptr_t address); // called before the free
};

// Installs the tracer, or takes it away again if `listener` is null. Calls in progress may still
// reach the old listener, whose functions must not throw.
void listen_to_gpu_trace(const GpuTraceListener *listener);

} // namespace esper
