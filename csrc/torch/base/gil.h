// The GIL, for calls that may wait.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace esper
{

// Whether there is an interpreter, and it is not finalizing.
inline bool python_is_there()
{
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

// Whether the calling thread holds the GIL. PyGILState_Check() answers yes for ever once the
// process has made a subinterpreter. Python must be there.
inline bool holds_gil()
{
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked() != nullptr;
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet() != nullptr; // the calling thread's
#else
  const PyThreadState *running = _PyThreadState_UncheckedGet(); // of whoever holds the GIL
  return running != nullptr && running == PyGILState_GetThisThreadState();
#endif
}

// Releases the GIL if the caller holds it; calls from a capture do not. What the call waits for may
// need another Python thread. It is kept while the interpreter finalizes: then no other gets it.
class WithoutGil
{
public:
  WithoutGil()
  {
    if (python_is_there() && holds_gil()) {
      released_.emplace();
    }
  }

private:
  std::optional<pybind11::gil_scoped_release> released_;
};

} // namespace esper
