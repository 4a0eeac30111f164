// What the auditor knows of memory with a fence (esper_fence() in esper_alloc.h): where it was
// allocated, and where and when it was freed. Keeps the last frees, up to a limit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../../audit/audit.h"
#include "../base/watchers.h"

namespace esper::fence
{

struct Freed {
  uintptr_t address;
  size_t size;
  int device;
  uint64_t home;             // handle of its stream
  uint32_t allocated, freed; // sites
  uint64_t number;           // of the free, from 1
  double seconds;            // between the free and the question
  // A use that was not ordered before the free.
  std::optional<audit_finding> in_use;
};

// Begins: new memory gets a fence. Throws if a device cannot map pages.
void turn_on();
// Ends. What is known stays until the next turn_on().
void turn_off();

// What was freed at this address last. Nothing: it is live, was never behind a fence, or was freed
// too long ago.
std::optional<Freed> freed_at(uintptr_t address);
// The last frees, the latest first; or only those of memory that was in use.
std::vector<Freed> last_freed(size_t most, bool only_in_use);
// The engine has found that about the block, which will be freed now.
void is_freed_in_use(uintptr_t address, const audit_finding &use);
// How many frees there were.
uint64_t frees();

namespace detail
{
void after_malloc(void *ptr);
void before_free(void *ptr);
} // namespace detail

inline bool is_on()
{
  return is_watched_by(Watcher::FENCE);
}

// To be called when the core has handed out a block, and before it is given one back.
inline void after_malloc(void *ptr)
{
  if (is_on()) {
    detail::after_malloc(ptr);
  }
}
inline void before_free(void *ptr)
{
  if (is_on()) {
    detail::before_free(ptr);
  }
}

} // namespace esper::fence
