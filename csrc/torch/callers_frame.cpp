#include "callers_frame.h"

#include <frameobject.h>

#if PY_VERSION_HEX >= 0x030E0000 && PY_VERSION_HEX < 0x030F0000 && !defined(Py_GIL_DISABLED)
#define HAS_FRAME_OF_3_14 1
#define Py_BUILD_CORE 1 // for the two structures alone
#include <internal/pycore_frame.h>
#include <internal/pycore_interpframe_structs.h>
#undef Py_BUILD_CORE
#endif

namespace esper
{

#ifdef HAS_FRAME_OF_3_14

// The frame says where its stack ends. The arguments are a copy, and lie elsewhere.
CallersFrame CallersFrame::of_call(const PassedArguments & /*passed*/)
{
  static_assert(sizeof(_PyStackRef) == sizeof(Slot));
  CallersFrame found;
  PyFrameObject *frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return found;
  }
  PyCodeObject *code = PyFrame_GetCode(frame);
  const _PyStackRef *first = frame->f_frame->localsplus;
  const _PyStackRef *stack = first + code->co_nlocalsplus;
  const _PyStackRef *end = frame->f_frame->stackpointer;
  // The structure is the expected one only if it points back to its object.
  if (frame->f_frame->frame_obj == frame && end >= stack && end <= stack + code->co_stacksize) {
    found.first_ = &first->bits;
    found.stack_ = &stack->bits;
    found.end_ = &end->bits;
  }
  Py_DECREF(code); // the frame holds it
  return found;
}

#elif PY_VERSION_HEX >= 0x030E0000 || defined(Py_GIL_DISABLED)

CallersFrame CallersFrame::of_call(const PassedArguments & /*passed*/)
{
  return {};
}

#else

namespace
{

// Whether the interpreter itself made the call: the function lies below its arguments on `stack`,
// in Python 3.13 with a slot between that may be empty. In Python 3.10 a method called with
// keywords lies in the place of self. What C code calls (a bound method, partial()) may overwrite
// that slot with an argument that it only borrows.
bool is_direct(const PassedArguments &passed, PyObject *const *stack)
{
  const auto is_called = [&](PyObject *const *slot) {
    return slot >= stack && passed.is_called(*slot);
  };
  const bool below = is_called(passed.first - 1) || is_called(passed.first);
#if PY_VERSION_HEX >= 0x030D0000
  return below ||
         (passed.first > stack && passed.first[-1] == nullptr && is_called(passed.first - 2));
#else
  return below;
#endif
}

} // namespace

// A frame has its local variables, cells and free variables first, then its evaluation stack. From
// Python 3.11 on the frame of a running function is the last thing on its thread's data stack, and
// that of a generator or coroutine is in its object. Whether this is the frame is checked: the
// arguments must lie on its evaluation stack.
CallersFrame CallersFrame::of_call(const PassedArguments &passed)
{
  CallersFrame found;
  PyFrameObject *frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return found;
  }
#if PY_VERSION_HEX >= 0x030B0000
  PyCodeObject *code = PyFrame_GetCode(frame);
  const Py_ssize_t variables = code->co_nlocalsplus;
  const Py_ssize_t slots = variables + code->co_stacksize;
  Py_DECREF(code); // the frame holds it
  PyObject *const *first = PyThreadState_Get()->datastack_top - slots;
  if (PyObject *generator = PyFrame_GetGenerator(frame)) {
    // Its items are the local variables and the stack.
    first = reinterpret_cast<PyObject *const *>(reinterpret_cast<const char *>(generator) +
                                                Py_TYPE(generator)->tp_basicsize);
    Py_DECREF(generator); // it runs
  }
#else
  const PyCodeObject *code = frame->f_code;
  const Py_ssize_t variables =
      code->co_nlocals + PyTuple_GET_SIZE(code->co_cellvars) + PyTuple_GET_SIZE(code->co_freevars);
  const Py_ssize_t slots = variables + code->co_stacksize;
  PyObject *const *first = frame->f_localsplus;
#endif
  PyObject *const *stack = first + variables;
  if (passed.behind > stack && passed.behind <= first + slots && is_direct(passed, stack)) {
    found.first_ = first;
    found.end_ = passed.behind;
  }
  return found;
}

#endif

} // namespace esper
