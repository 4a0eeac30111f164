// record_use: finds the memory behind the values that Python passes, and marks it.
//
// A mark says that the stream will not read the tensor again. But where autograd records
// operations, it may have saved the tensor, and backward reads it later on the same stream. So
// there a mark lasts until the free: autograd_may_read() in marking.h.
#pragma once

#include "marking.h"

namespace esper
{

// The end of a use as Python gave it, for tensors that Python marks.
struct PythonEnd {
  PyObject *stream = Py_None; // borrowed
  PyObject *event = Py_None;  // borrowed
};

// The memory behind a value, which is a tensor or containers of them, nested to any depth.
// Everything is found before anything is marked, so a bad value changes nothing.
//
// What PyTorch has to see goes through the operators (operators.cpp): everything while a dispatch
// mode is active (tracing, fake tensors), and always tensors that wrap others without saying which.
class Gathering
{
public:
  Gathering();
  ~Gathering();
  Gathering(const Gathering &) = delete;
  Gathering &operator=(const Gathering &) = delete;

  // Raises TypeError if the value is neither a tensor nor a container.
  void add_argument(PyObject *value);

  // To be called when all are added. Releases the GIL while marking.
  void mark(const End &end, const PythonEnd &python_end);

private:
  bool add(PyObject *value);
  void add_element(PyObject *value);
  void add_wrapper(PyObject *wrapper);
  bool add_children(PyObject *value);
  void add_tensor(PyObject *object, const at::Tensor &tensor);
  void mark_others(const End &end, const PythonEnd &python_end);

  bool mode_is_active_;
  Memory memory_;
  c10::SmallVector<PyObject *, 1> others_; // owned; marked by Python
};

// The Python function. METH_FASTCALL | METH_KEYWORDS.
PyObject *record_use(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);

// record_use() as a descriptor to be set on torch.Tensor, which has no such method yet.
PyObject *make_tensor_method(PyObject *module, PyObject *tensor_class);

// touch(tensors, stream): marks uses that last until the free.
PyObject *touch(PyObject *module, PyObject *const *args, Py_ssize_t count);

} // namespace esper
