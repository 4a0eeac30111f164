// The shim's access to the core: the table of functions that esper_alloc._core publishes, the
// process's one core, and exceptions for failed calls.
#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>

#include <atomic>

#include "../python/capi.h"

namespace esper
{

namespace detail
{
extern const esper_capi *table;
extern std::atomic<esper_core *> the_core;
extern std::atomic<bool> forked; // since it was made
esper_core *make_core();
} // namespace detail

// Called once, when the Python module is imported, before anything else in this file.
void set_capi(const esper_capi *table);

inline const esper_capi &capi()
{
  return *detail::table;
}

// The process's core. The first call makes it and gives it PyTorch's options. Throws if CUDA's
// driver does not work.
inline esper_core *core()
{
  esper_core *made = detail::the_core.load(std::memory_order_acquire);
  return C10_LIKELY(made != nullptr) ? made : detail::make_core();
}

// For destructors, which must not throw. Null in a child that was forked after the core was made:
// what is to be freed there belongs to the parent.
inline esper_core *core_unless_forked()
{
  return C10_LIKELY(!detail::forked.load(std::memory_order_relaxed)) ? core() : nullptr;
}

// The core if it was made; null until PyTorch has used it.
inline esper_core *core_if_made()
{
  return detail::the_core.load(std::memory_order_acquire);
}

// Throws the exception that a PyTorch program expects for a failed call of the core.
[[noreturn]] void throw_status(esper_status status, const char *doing);

inline void check(esper_status status, const char *doing)
{
  if (C10_UNLIKELY(status != ESPER_OK)) {
    throw_status(status, doing);
  }
}

} // namespace esper
