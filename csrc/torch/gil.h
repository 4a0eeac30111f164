// The GIL, for calls that may wait.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace esper
{

// Releases the GIL if the caller holds it; calls from a capture do not. What the call waits for may
// need another Python thread.
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
