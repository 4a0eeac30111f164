// What the measuring loops share: each is a plain CPython module that calls torch's
// current allocator the way C++ code does, so that no Python is in the numbers. They
// need c10's headers only, and compile in seconds.
#ifndef ESPER_ALLOC_BENCHMARKS_LOOPS_H
#define ESPER_ALLOC_BENCHMARKS_LOOPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/cuda/CUDACachingAllocator.h>

#include <chrono>
#include <exception>
#include <string>
#include <vector>

namespace allocator = c10::cuda::CUDACachingAllocator;
using Clock = std::chrono::steady_clock;

inline double nanoseconds_since(Clock::time_point begin)
{
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

// Runs `measure` without the GIL; false, with Python's exception set, where it threw.
template <typename Measure>
bool without_gil(Measure measure)
{
  std::string error;
  bool done = true;
  Py_BEGIN_ALLOW_THREADS
  try {
    measure();
  } catch (const std::exception &e) {
    error = e.what();
    done = false;
  }
  Py_END_ALLOW_THREADS if (!done) PyErr_SetString(PyExc_RuntimeError, error.c_str());
  return done;
}

// A list of what `make` returns for each value, new references; null with an exception.
template <typename Value, typename Make>
PyObject *list_of(const std::vector<Value> &values, Make make)
{
  PyObject *list = PyList_New(0);
  for (const Value &value : values) {
    PyObject *one = list ? make(value) : nullptr;
    if (!one || PyList_Append(list, one) < 0)
      Py_CLEAR(list);
    Py_XDECREF(one);
  }
  return list;
}

#endif
