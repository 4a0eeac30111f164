#include "callers_frame.h"

#include <frameobject.h>

namespace esper
{

#if PY_VERSION_HEX >= 0x030E0000 || defined(Py_GIL_DISABLED)

CallersFrame CallersFrame::of_call(PyObject *const * /*end*/)
{
  return {};
}

#else

namespace
{

// The global variables, borrowed, if they are the local ones too. Null in functions and classes.
PyObject *globals_as_locals(PyFrameObject *frame, const PyCodeObject *code)
{
  if ((code->co_flags & CO_OPTIMIZED) != 0) {
    return nullptr;
  }
#if PY_VERSION_HEX >= 0x030B0000
  PyObject *globals = PyFrame_GetGlobals(frame);
  PyObject *locals = PyFrame_GetLocals(frame);
  Py_XDECREF(globals); // the frame holds them
  Py_XDECREF(locals);
#else
  PyObject *globals = frame->f_globals;
  PyObject *locals = frame->f_locals;
#endif
  return locals == globals ? globals : nullptr;
}

} // namespace

// A frame has its local variables, cells and free variables first, then its evaluation stack. From
// Python 3.11 on the frame of a running function is the last thing on its thread's data stack; a
// generator's frame is elsewhere. Whether this is the frame is checked: the arguments must lie on its
// evaluation stack.
CallersFrame CallersFrame::of_call(PyObject *const *end)
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
  PyObject *globals = globals_as_locals(frame, code);
  Py_DECREF(code); // the frame holds it
  PyObject *const *first = PyThreadState_Get()->datastack_top - slots;
#else
  const PyCodeObject *code = frame->f_code;
  const Py_ssize_t variables =
      code->co_nlocals + PyTuple_GET_SIZE(code->co_cellvars) + PyTuple_GET_SIZE(code->co_freevars);
  const Py_ssize_t slots = variables + code->co_stacksize;
  PyObject *globals = globals_as_locals(frame, code);
  PyObject *const *first = frame->f_localsplus;
#endif
  if (end > first + variables && end <= first + slots) {
    found.first_ = first;
    found.end_ = end;
    found.globals_ = globals;
  }
  return found;
}

#endif

} // namespace esper
