// Who watches allocations and frees. Most programs have no watcher, so one word says who there is,
// and each allocation and free looks at it before it calls any of them.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>

namespace esper
{

enum class Watcher : unsigned {
  STREAMS = 1, // automatic.h: until there is a stream besides the default ones
  FRAMES = 2,  // history.h: frames of the program are recorded
  FENCE = 4,   // fence.h
};

namespace detail
{
inline std::atomic<unsigned> watchers{0};
} // namespace detail

inline bool is_watched()
{
  return C10_UNLIKELY(detail::watchers.load(std::memory_order_relaxed) != 0);
}

inline bool is_watched_by(Watcher one)
{
  const unsigned bit = static_cast<unsigned>(one);
  return C10_UNLIKELY((detail::watchers.load(std::memory_order_relaxed) & bit) != 0);
}

// Returns whether it was on.
inline bool set_watcher(Watcher one, bool on)
{
  const unsigned bit = static_cast<unsigned>(one);
  return ((on ? detail::watchers.fetch_or(bit) : detail::watchers.fetch_and(~bit)) & bit) != 0;
}

} // namespace esper
