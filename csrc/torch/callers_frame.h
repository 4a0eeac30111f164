// The references that the calling Python function itself holds: in its local variables, and on its
// evaluation stack, where the arguments of the call are.
//
// They are the caller's own. A variable that a closure reads too is in a cell, a global one in a
// dictionary, which any function may read, and obj.x and items[i] in an object: those hold a
// reference of their own, which is not counted here. So they show as holders.
#pragma once

#include <torch/csrc/python_headers.h>

#include <cstdint>

namespace esper
{

// The arguments of a call, as a C function was given them.
struct PassedArguments {
  PyObject *const *first; // self is the first of a method's
  PyObject *const *behind;
  bool (*is_called)(PyObject *); // whether an object is the function that was called
};

class CallersFrame
{
public:
  // Of an unknown caller: no references.
  CallersFrame() = default;

  // Unknown: the arguments are not on the stack of a Python function (C code calls), or this
  // version of Python is not known.
  static CallersFrame of_call(const PassedArguments &passed);

  bool is_known() const
  {
    return first_ != nullptr;
  }

  Py_ssize_t references(PyObject *object) const
  {
    if (object == nullptr) {
      return 0;
    }
    Py_ssize_t count = 0;
    for (const Slot *slot = first_; slot != end_; ++slot) {
#if PY_VERSION_HEX >= 0x030E0000
      if ((*slot & ~tags) != reinterpret_cast<Slot>(object)) {
        continue;
      }
      if ((*slot & tags) == 0) {
        ++count;
      } else if (slot < stack_) {
        return another_variable;
      }
#else
      count += *slot == object || is_method_of(*slot, object) ? 1 : 0;
#endif
    }
    return count;
  }

private:
#if PY_VERSION_HEX >= 0x030E0000
  // A pointer. If its lowest bits are not 0, it borrows the reference: the stack from a variable, a
  // parameter from a variable of another function, which can reach the object, too.
  using Slot = uintptr_t;
  static constexpr Slot tags = 3;
  static constexpr Py_ssize_t another_variable = -(Py_ssize_t{1} << 40); // any count is more

  const Slot *stack_ = nullptr; // behind the variables
#else
  using Slot = PyObject *;

  // Up to Python 3.10 a method that is called with keywords is an object on the stack, and holds
  // its tensor.
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
#endif

  const Slot *first_ = nullptr; // the first local variable
  const Slot *end_ = nullptr;
};

} // namespace esper
