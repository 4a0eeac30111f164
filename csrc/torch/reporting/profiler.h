// Tells PyTorch's tracers and its memory profiler of allocations and frees.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/macros/Macros.h>

#include <cstdint>

namespace esper
{

// For memory that the core does not know, which the profiler is not told of. These may throw: a
// tracer may be Python code.
inline void tell_tracer_of_allocation(void *ptr)
{
  const c10::impl::PyInterpreter *tracer = c10::impl::GPUTrace::get_trace();
  if (C10_UNLIKELY(tracer != nullptr)) {
    (*tracer)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
  }
}

inline void tell_tracer_of_free(void *ptr)
{
  const c10::impl::PyInterpreter *tracer = c10::impl::GPUTrace::get_trace();
  if (C10_UNLIKELY(tracer != nullptr)) {
    (*tracer)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
  }
}

// Tells the profiler of an allocation or free, with the device's totals. Only while it records
// memory, because reading the totals is slow.
void report_to_profiler(const void *ptr, bool allocated);

// After an allocation from the core, and before a free.
inline void tell_of_allocation(void *ptr)
{
  tell_tracer_of_allocation(ptr);
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    report_to_profiler(ptr, true);
  }
}

inline void tell_of_free(void *ptr)
{
  tell_tracer_of_free(ptr);
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    report_to_profiler(ptr, false);
  }
}

} // namespace esper
