// When memory runs out: what is tried through PyTorch, who is told, and what
// the caller gets.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>

namespace esper
{

// Runs every callback of PyTorch's FreeCudaMemoryCallbacksRegistry; nonzero:
// one of them freed something. The core calls it, holding no lock.
int free_registered_memory(void *context);

void add_out_of_memory_observer(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer);

// Told of requests that are rejected before the device was asked, as
// throw_on_cudamalloc_oom wants: device, bytes that it would have been asked for,
// bytes reserved, bytes of the device.
void add_rejection_observer(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer);

// Throws torch.OutOfMemoryError with the figures of this thread's last
// ESPER_OUT_OF_MEMORY, after telling the observers and the profiler.
[[noreturn]] void throw_out_of_memory();

// The same for ESPER_REJECTED.
[[noreturn]] void throw_rejection();

// No device has an exabyte, and sizes beyond it are overflowed arithmetic.
void check_size(size_t size);

} // namespace esper
