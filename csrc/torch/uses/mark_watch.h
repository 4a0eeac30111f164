// Tells whoever wants to know of marks: by record_use(), using() and touch(), and those that
// PyTorch asks this allocator for.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <atomic>

#include "../base/python_objects.h"

namespace esper
{

struct MarkWatcher {
  void (*marked)(const void *ptr, c10::cuda::CUDAStream stream, bool until_free);
  void (*marked_by_event)(const void *ptr, const RecordedEvent &event);
  void (*held)(const void *ptr); // for all streams
};

namespace detail
{
inline std::atomic<const MarkWatcher *> mark_watcher{nullptr};
}

// One at a time; null: nobody.
inline void watch_marks_with(const MarkWatcher *watcher)
{
  detail::mark_watcher.store(watcher, std::memory_order_release);
}

inline const MarkWatcher *mark_watcher()
{
  return detail::mark_watcher.load(std::memory_order_acquire);
}

} // namespace esper
