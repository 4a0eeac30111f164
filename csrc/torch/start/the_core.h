// The process's core, made at first use with PyTorch's options.
#pragma once

#include "../base/core_api.h"

namespace esper
{

namespace detail
{
extern std::atomic<bool> forked; // since the core was made
esper_core *make_core();
} // namespace detail

// The process's core. The first call makes it and gives it PyTorch's options. Throws if CUDA's
// driver does not work.
inline esper_core *core()
{
  esper_core *made = core_if_made();
  return C10_LIKELY(made != nullptr) ? made : detail::make_core();
}

// For destructors and ends of captures. Null in a child that was forked after the core was made:
// what is to be freed there belongs to the parent. Throws as core() does.
inline esper_core *core_unless_forked()
{
  return C10_LIKELY(!detail::forked.load(std::memory_order_relaxed)) ? core() : nullptr;
}

} // namespace esper
