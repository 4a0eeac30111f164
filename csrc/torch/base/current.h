// Whether PyTorch allocates CUDA memory through esper_alloc.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

namespace esper
{

// Called once, by the allocator when it is complete.
void set_our_allocator(const c10::cuda::CUDACachingAllocator::CUDAAllocator *ours);

// Whether that allocator is PyTorch's current one.
bool is_current();

} // namespace esper
