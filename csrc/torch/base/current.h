// Whether PyTorch allocates CUDA memory through esper_alloc.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>

namespace esper
{

namespace detail
{
inline std::atomic<const c10::cuda::CUDACachingAllocator::CUDAAllocator *> our_allocator{nullptr};
} // namespace detail

// Called once, by the allocator when it is complete.
inline void set_our_allocator(const c10::cuda::CUDACachingAllocator::CUDAAllocator *ours)
{
  detail::our_allocator.store(ours);
}

// Whether that allocator is PyTorch's current one.
inline bool is_current()
{
  const auto *ours = detail::our_allocator.load();
  return ours != nullptr && c10::cuda::CUDACachingAllocator::get() == ours;
}

} // namespace esper
