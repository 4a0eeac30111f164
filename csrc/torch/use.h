// record_use: finding the memory behind whatever Python hands over, and
// marking it.
//
// Autograd. A mark says that the stream has no further reads coming. But an
// operation that autograd recorded may have saved the tensor, and its backward
// reads it later, on the same stream. So memory that may have been saved is
// marked as record_stream does, until its free, instead of until now.
//
// A tensor given to record_use() cannot have been saved when grad mode is off,
// when it is an inference tensor, or when nobody but the caller holds it: a
// saved tensor shares its TensorImpl or its storage, and a Python function that
// keeps it for later (ctx.x = x, a checkpoint's closure) holds a reference.
// Anything else may have been, and is treated so. One thing no count can show:
// a function that reads the caller's own variable, or an object's attribute,
// again in backward. Then the mark belongs after backward.
//
// A tensor given to using() cannot have been saved when no autograd node was
// made on this thread inside the scope (scope.cpp counts them).
#pragma once

#include "marking.h"

namespace esper
{

// Whether backward may read what is marked.
enum class Saved {
  ask_tensor, // by the rule for record_use()
  no,
  yes
};

// The end of a use as Python gave it, for what is marked there.
struct PythonEnd {
  PyObject *stream = Py_None; // borrowed
  PyObject *event = Py_None;  // borrowed
};

// The memory behind a value: a tensor, or containers of them to any depth.
// Nothing is marked before everything was found, so a bad value leaves
// everything as it was.
//
// What PyTorch has to see goes through the operators (operators.cpp) instead:
// everything while a dispatch mode is active (tracing, fake tensors), and at
// all times tensors that stand for others without saying for which.
class Gathering
{
public:
  explicit Gathering(Saved saved);
  ~Gathering();
  Gathering(const Gathering &) = delete;
  Gathering &operator=(const Gathering &) = delete;

  // `references`: how many Python references the caller itself accounts for.
  // A value that is neither tensor nor container is a TypeError.
  void add_argument(PyObject *value, Py_ssize_t references);

  // Releases the GIL while it marks.
  void mark(const End &end, const PythonEnd &python_end);

private:
  bool add(PyObject *value, Py_ssize_t references);
  void add_element(PyObject *value, Py_ssize_t references);
  void add_wrapper(PyObject *wrapper);
  bool add_children(PyObject *value, Py_ssize_t references);
  void add_tensor(PyObject *object, const at::Tensor &tensor, bool may_be_saved);
  bool may_be_saved(PyObject *object, const at::Tensor &tensor, Py_ssize_t references) const;
  void mark_others(const End &end, const PythonEnd &python_end);

  Saved saved_;
  bool mode_is_active_;
  Memory memory_;
  c10::SmallVector<PyObject *, 1> others_; // owned; Python marks them
};

// The Python function. METH_FASTCALL | METH_KEYWORDS.
PyObject *record_use(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
extern const char record_use_doc[];

// The same as a method that torch.Tensor does not have yet: a descriptor to be
// set on that class, where it counts references as the function does.
PyObject *make_tensor_method(PyObject *module, PyObject *tensor_class);

} // namespace esper
