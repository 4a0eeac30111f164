// The shim's access to the core: the table of functions that esper_alloc._core publishes, and
// exceptions for failed calls. Most files need the core itself, too: the_core.h.
#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>

#include <atomic>

#include "../../python/capi.h"

namespace esper
{

namespace detail
{
extern const esper_capi *table;
extern std::atomic<esper_core *> the_core; // set by the_core.cpp
} // namespace detail

// Called once, when the Python module is imported, before anything else in this file.
void set_capi(const esper_capi *table);

inline const esper_capi &capi()
{
  return *detail::table;
}

// The process's core if it was made. Null until PyTorch has used it, and in a child that was forked
// after that.
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
