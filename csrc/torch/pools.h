// What private pools need of the process around them.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace esper
{

// Rethrows what a pool's filter, or its own allocator, threw in the calling
// thread's last malloc, if one did.
void rethrow_callback_failure();

// Some calls come with the GIL, a capture's without. What they wait for may need
// another thread of Python to go on.
class WithoutGil
{
public:
  WithoutGil()
  {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      released_.emplace();
    }
  }

private:
  std::optional<pybind11::gil_scoped_release> released_;
};

} // namespace esper
