#include "current.h"

#include <atomic>

namespace esper
{
namespace
{

namespace native = c10::cuda::CUDACachingAllocator;

std::atomic<const native::CUDAAllocator *> our_allocator{nullptr};

} // namespace

void set_our_allocator(const native::CUDAAllocator *ours)
{
  our_allocator.store(ours);
}

bool is_current()
{
  const native::CUDAAllocator *ours = our_allocator.load();
  return ours != nullptr && native::get() == ours;
}

} // namespace esper
