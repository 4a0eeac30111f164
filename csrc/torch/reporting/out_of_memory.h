// When memory has run out: observers, and the exceptions.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>

namespace esper
{

void add_out_of_memory_observer(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer);

// The observer is called for requests that throw_on_cudamalloc_oom makes the core reject without
// asking the device. It gets the device, the bytes that would have been requested from it, the
// bytes reserved, and the device's total bytes.
void add_rejection_observer(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer);

// Calls the observers and the profiler, then throws torch.OutOfMemoryError with the figures of this
// thread's last ESPER_OUT_OF_MEMORY.
[[noreturn]] void throw_out_of_memory();

// The same for ESPER_REJECTED.
[[noreturn]] void throw_rejection();

// Rejects sizes above an exabyte, which only come from arithmetic overflow.
void check_size(size_t size);

} // namespace esper
