// How NCCL registers memory. The allocator registers nothing: PyTorch's process group attaches a
// tracker (attachAllocatorTraceTracker), which registers each new segment that it is told of.
// watch() in history.cpp tells it.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <utility>
#include <vector>

namespace esper
{

using Trackers = std::vector<c10::CachingDeviceAllocator::AllocatorTraceTracker>;

namespace detail
{
inline std::atomic<const Trackers *> trackers{nullptr}; // replaced as a whole, never changed
} // namespace detail

// Null: there is none.
inline const Trackers *attached_trackers()
{
  return detail::trackers.load(std::memory_order_acquire);
}

// One call at a time. Threads may still read the old list, so it is never freed. There are few of
// them.
inline void attach_tracker(c10::CachingDeviceAllocator::AllocatorTraceTracker tracker)
{
  const Trackers *before = attached_trackers();
  auto *after = before ? new Trackers(*before) : new Trackers();
  after->push_back(std::move(tracker));
  detail::trackers.store(after, std::memory_order_release);
}

inline void tell_trackers(const Trackers *trackers,
                          const c10::CachingDeviceAllocator::TraceEntry &entry)
{
  if (trackers != nullptr) {
    for (const auto &tracker : *trackers) {
      tracker(entry);
    }
  }
}

} // namespace esper
