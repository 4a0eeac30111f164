// The references that the calling Python function itself holds: in its local variables, and on its
// evaluation stack, where the arguments of the call are.
//
// They are the caller's own. A variable that a closure reads too is in a cell, a global one in a
// dictionary, which any function may read, and obj.x and items[i] in an object: those hold a reference
// of their own, which is not counted here. So they show as holders.
#pragma once

#include <torch/csrc/python_headers.h>

namespace esper
{

class CallersFrame
{
public:
  // Of an unknown caller: no references.
  CallersFrame() = default;

  // `end` is behind the last argument that the interpreter passed. Unknown: the arguments are not on
  // the stack of a Python function (C code calls), or Python is 3.14 or newer, where the stack
  // borrows.
  static CallersFrame of_call(PyObject *const *end);

  bool is_known() const
  {
    return first_ != nullptr;
  }

  Py_ssize_t references(PyObject *object) const
  {
    Py_ssize_t count = 0;
    for (PyObject *const *slot = first_; slot != end_; ++slot) {
      count += *slot == object || is_method_of(*slot, object) ? 1 : 0;
    }
    return count;
  }

private:
  // Up to Python 3.10 a method that is called with keywords is an object on the stack, and holds its
  // tensor.
  static bool is_method_of(PyObject *called, PyObject *object)
  {
#if PY_VERSION_HEX < 0x030B0000
    return called != nullptr && PyCFunction_Check(called) && Py_REFCNT(called) == 1 &&
           PyCFunction_GET_SELF(called) == object;
#else
    (void)called;
    (void)object;
    return false;
#endif
  }

  PyObject *const *first_ = nullptr; // the first local variable
  PyObject *const *end_ = nullptr;
};

} // namespace esper
