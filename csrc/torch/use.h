// record_use: finds the memory behind the values that Python passes, and marks it.
//
// Autograd. A mark says that the stream will not read the tensor again. But an operation that
// autograd recorded may have saved it, and backward reads it later on the same stream. So memory
// that may have been saved is marked until its free.
//
// A tensor given to record_use() cannot have been saved when grad mode is off and nothing that
// autograd calls makes the mark (saving.h), or when only the caller can reach its memory, which
// holders.h finds out. Every other tensor counts as saved, inference tensors too: a custom function
// or a hook may keep one.
//
// A tensor given to using() cannot have been saved when this thread made no autograd node inside
// the scope (scope.cpp counts them), and autograd did not call what contains the scope.
#pragma once

#include "holders.h"
#include "marking.h"
#include "saving.h"

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
  // For record_use(): who can reach a tensor is counted where autograd may have saved it.
  Gathering();
  // For others: what may be saved is marked until the free.
  explicit Gathering(MaySave may_save);
  ~Gathering();
  Gathering(const Gathering &) = delete;
  Gathering &operator=(const Gathering &) = delete;

  // `passed`: the arguments of which the value is one. The references that the caller itself holds
  // can be counted if they are on the stack of a Python function; if not, others may hold the
  // value. Raises TypeError if the value is neither a tensor nor a container.
  void add_argument(PyObject *value, const PassedArguments *passed = nullptr);

  // To be called when all are added. Releases the GIL while marking.
  void mark(const End &end, const PythonEnd &python_end);

private:
  bool add(PyObject *value, const References &references);
  void add_element(PyObject *value, const References &references);
  void add_wrapper(PyObject *wrapper);
  bool add_children(PyObject *value, const References &references);
  void add_tensor(PyObject *object, const at::Tensor &tensor, const References &references);
  void add_memory(PyObject *object, const at::Tensor &tensor, Why why);
  Why why_saved(PyObject *object, const at::Tensor &tensor, const References &references) const;
  void mark_others(const End &end, const PythonEnd &python_end);
  void note_whys() const;

  MaySave may_save_;
  bool counts_; // who can reach a tensor
  bool mode_is_active_;
  CallersFrame caller_;
  Memory memory_;
  Holders holders_;                        // of tensors that are marked when all are known
  uint32_t whys_ = 0;                      // bit i: a mark lasts until the free for reason i
  c10::SmallVector<PyObject *, 1> others_; // owned; marked by Python
};

// The Python function. METH_FASTCALL | METH_KEYWORDS.
PyObject *record_use(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);

// record_use() as a descriptor to be set on torch.Tensor, which has no such method yet. It counts
// references as the function does.
PyObject *make_tensor_method(PyObject *module, PyObject *tensor_class);

// watch_marks(on): whether Python is told of marks that last until the free.
PyObject *watch_marks(PyObject *module, PyObject *on);

// touch(tensors, stream): marks uses that last until the free.
PyObject *touch(PyObject *module, PyObject *const *args, Py_ssize_t count);

} // namespace esper
