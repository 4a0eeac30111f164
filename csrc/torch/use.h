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

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "python_objects.h"

namespace esper {

// Whether backward may read what is marked.
enum class Saved {
  ask_tensor, // by the rule for record_use()
  no,
  yes
};

// When and where the marked use ends.
struct End {
  // Nothing: the current stream of each tensor's device.
  std::optional<c10::cuda::CUDAStream> stream;
  // If given, the use ends with it, and `stream` only serves what an event
  // cannot: memory of other allocators, and saved tensors.
  std::optional<RecordedEvent> event;
  // As the caller gave it, for tensors of other kinds of device. Borrowed.
  PyObject* stream_object = Py_None;
  bool gate = true;
};

// The memory behind a value: a tensor, or containers of them to any depth.
// Nothing is marked before everything was found, so a bad value leaves
// everything as it was.
class Gathering {
 public:
  explicit Gathering(Saved saved) : saved_(saved) {}
  ~Gathering();
  Gathering(const Gathering&) = delete;
  Gathering& operator=(const Gathering&) = delete;

  // `references`: how many Python references the caller itself accounts for.
  // A value that is neither tensor nor container is a TypeError.
  void add_argument(PyObject* value, Py_ssize_t references);

  // Releases the GIL while it marks.
  void mark(const End& end);

 private:
  struct Block {
    const void* ptr;
    c10::DeviceIndex device;
  };
  using Blocks = c10::SmallVector<Block, 8>;

  bool add(PyObject* value, Py_ssize_t references);
  void add_element(PyObject* value, Py_ssize_t references);
  void add_wrapper(PyObject* wrapper);
  bool add_children(PyObject* value, Py_ssize_t references);
  void add_tensor(const at::Tensor& tensor, bool may_be_saved);
  bool may_be_saved(
      PyObject* object,
      const at::Tensor& tensor,
      Py_ssize_t references) const;

  Saved saved_;
  Blocks precise_;
  Blocks until_free_;
  c10::SmallVector<at::Tensor, 1> foreign_; // CUDA memory that is not ours
  c10::SmallVector<PyObject*, 1> others_; // owned; ask their record_stream
};

// The Python function. METH_FASTCALL | METH_KEYWORDS.
PyObject* record_use(
    PyObject* module,
    PyObject* const* args,
    Py_ssize_t count,
    PyObject* names);
extern const char record_use_doc[];

} // namespace esper
