// The GIL, for calls that may wait.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "../../python/gil.h"

namespace esper
{

// Releases the GIL if the caller holds it; calls from a capture do not. What the call waits for may
// need another Python thread. It is kept while the interpreter finalizes: then no other gets it.
class WithoutGil
{
public:
  WithoutGil()
  {
    if (esper_py_is_there() != 0 && esper_py_holds_gil() != 0) {
      released_.emplace();
    }
  }

private:
  std::optional<pybind11::gil_scoped_release> released_;
};

} // namespace esper
