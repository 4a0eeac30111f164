// Who can reach the memory behind a tensor: counts its holders exactly.
//
// A mark says that the stream will not read the memory again. But autograd may have saved it, or
// another function may keep it, and read it later on the same stream. Then the mark must last until
// the free. A count that missed a holder would silently corrupt data. So whatever is not accounted
// for below means that others can reach the memory.
//
// What holds memory, in torch 2.11:
//   a StorageImpl   has the memory. Each TensorImpl over it has a strong reference, and so has the
//                   storage's Python object, which untyped_storage() makes. Other storages with the
//                   same memory (copy-on-write, DLPack, __cuda_array_interface__) have another
//                   deleter than the allocator's.
//   a TensorImpl    is referred to by its Python object; by each view of it, whose autograd
//                   metadata names the base (always the root: views of views name the same one); by
//                   what autograd saved (SavedVariable), accumulates into (AccumulateGrad) or wraps
//                   (functorch); by C++ code.
//                   An output that an operation saved, what detach() and .data return, and a view
//                   that backward makes again are TensorImpls of their own over the same storage.
//   a Python object is referred to by variables, containers, closures, attributes, ctx.x and so on.
//                   While anything but the object itself refers to its TensorImpl or StorageImpl,
//                   that has one reference to the object (PyObject preservation).
//   weak references, in Python and C++, turn into strong ones later. There must be none.
//
// So others cannot reach a storage if
//   - each tensor that the caller passes has just the Python references that the caller accounts
//     for, and its TensorImpl just its Python object and the passed views of it;
//   - each base of those has just these views, and its Python object, if it has one, just the
//     caller's variables;
//   - the storage has just these TensorImpls, and its Python object, if it has one, nothing else;
//     and it has the allocator's deleter.
//
// The order matters, because other threads drop and copy C++ references without the GIL. From a
// Python object one gets to its TensorImpl, from a view to its base, from each to the storage, and
// never back. So views are counted first, then other tensors, then bases, then storages: who was
// not seen at one count cannot have come to hold what is counted afterwards.
//
// Which Python references the caller accounts for, use.cpp says. Parameters are read by modules as
// a rule, and count as reachable.
//
// Python without a GIL: other threads take references at any moment, and each object's count is
// split between threads, so no count is exact and every tensor counts as reachable.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/python_headers.h>

#include <cstdint>

#include "callers_frame.h"

namespace esper
{

// Why a mark must last until the free.
enum class Why : uint8_t {
  nobody_else, // it need not: only the caller can reach the memory
  uncounted,   // not decided yet: other tensors of the call may account for the holders
  references,
  saved,
  container,
  base,
  storage,
  weak_references,
  parameter,
  foreign,
  subclass,
  scope,
  traced,
  no_gil
};

// In words, for a warning.
const char *words_for(Why why);

// The Python references to a value for which the caller accounts, beside those in its frame.
struct References {
  Py_ssize_t lasting;             // for the whole call
  Py_ssize_t passing = 0;         // further ones, while the value is looked at
  Why unknown = Why::nobody_else; // not so: they cannot be counted, for this reason

  Py_ssize_t now() const
  {
    return unknown == Why::nobody_else ? lasting + passing : -1;
  }
};

bool has_weak_references(PyObject *object);

// Decides for one tensor of a CUDA device that autograd may have saved. Why::uncounted: add it to
// Holders.
Why look_at(PyObject *object, const at::Tensor &tensor, const References &references,
            const CallersFrame &caller);

// Tensors that one call marks, to be counted together.
class Holders
{
public:
  Holders() = default;
  ~Holders()
  {
    if (!given_.empty()) {
      forget();
    }
  }
  Holders(const Holders &) = delete;
  Holders &operator=(const Holders &) = delete;

  void add(PyObject *object, const at::Tensor &tensor, Py_ssize_t references);

  // Calls decided(object, tensor, why) once for each storage, and forgets the tensors.
  template <class Decided>
  void decide(const CallersFrame &caller, Decided decided)
  {
    if (C10_LIKELY(given_.empty())) {
      return;
    }
    sort();
    for (size_t first = 0, last; first < given_.size(); first = last) {
      last = end_of_storage(first);
      decided(given_[first].object, *given_[first].tensor, count(first, last, caller));
    }
    forget();
  }

private:
  struct Given {
    PyObject *object; // owned
    const at::Tensor *tensor;
    const at::Tensor *base; // null: it is no view, or its base has other memory
    Py_ssize_t references;  // with the one above
  };

  void sort();
  size_t end_of_storage(size_t first) const;
  Why count(size_t first, size_t last, const CallersFrame &caller);
  void forget();

  c10::SmallVector<Given, 4> given_;
};

} // namespace esper
