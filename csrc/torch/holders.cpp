#include "holders.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <tuple>

#include "deleter.h"

namespace esper
{

bool has_weak_references(PyObject *object)
{
  return PyType_SUPPORTS_WEAKREFS(Py_TYPE(object)) &&
         *PyObject_GET_WEAKREFS_LISTPTR(object) != nullptr;
}

namespace
{

c10::StorageImpl *storage_of(const at::Tensor &tensor)
{
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// The tensor that this one is a view of. Null: it is no view, or the base has other memory.
const at::Tensor *base_of(const at::Tensor &tensor)
{
  const auto *meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (meta == nullptr || !meta->has_bw_view()) {
    return nullptr;
  }
  const at::Tensor &base = meta->get_backward_view().base_;
  const auto *impl = base.unsafeGetTensorImpl();
  return impl->has_storage() && storage_of(base) == storage_of(tensor) ? &base : nullptr;
}

bool is_weakly_held(c10::StorageImpl *storage)
{
  auto borrowed = c10::intrusive_ptr<c10::StorageImpl>::reclaim(storage);
  const bool has = borrowed.weak_use_count() != 1;
  borrowed.release();
  return has;
}

// Whether no other storage can have the memory.
bool is_only_storage(c10::StorageImpl *storage)
{
  const auto deleter = storage->_mutable_data_ptr_no_checks().get_deleter();
  return deleter == &delete_memory ||
         deleter == c10::cuda::CUDACachingAllocator::get()->raw_deleter();
}

// Whether exactly `tensors` tensors hold the storage, and nothing else does.
Why count_storage(const at::Tensor &tensor, size_t tensors)
{
  c10::StorageImpl *storage = storage_of(tensor);
  if (!is_only_storage(storage)) {
    return Why::foreign;
  }
  // Asked first: what was a weak reference then and is a strong one now is counted below.
  const bool has_weak = is_weakly_held(storage);
  PyObject *object = storage->pyobj_slot()->load_pyobj();
  const size_t preserved = object != nullptr ? 1 : 0;
  if (tensor.unsafeGetTensorImpl()->unsafe_storage().use_count() != tensors + preserved ||
      (object != nullptr && Py_REFCNT(object) > 1)) {
    return Why::storage;
  }
  if (has_weak || (object != nullptr && has_weak_references(object))) {
    return Why::weak_references;
  }
  return Why::nobody_else;
}

// Whether the tensor is held by `views` views and its Python object alone, and that object by no
// more than `references` references. `object` null: there is none.
Why count_tensor(const at::Tensor &tensor, size_t views, PyObject *object, Py_ssize_t references)
{
  if (object != tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj()) {
    return Why::references;
  }
  const bool has_weak = tensor.weak_use_count() != 1; // asked first, as for a storage
  const Py_ssize_t found = object != nullptr ? Py_REFCNT(object) : 0;
  const bool is_saved = tensor.use_count() != views + (object != nullptr ? 1 : 0);
  const Py_ssize_t preserved = views != 0 || is_saved ? 1 : 0;
  if (found > references + preserved) {
    return Why::references;
  }
  if (is_saved) {
    return Why::saved;
  }
  if (has_weak || (object != nullptr && has_weak_references(object))) {
    return Why::weak_references;
  }
  return Why::nobody_else;
}

} // namespace

const char *words_for(Why why)
{
  switch (why) {
  case Why::references: return "other Python references to the tensor exist";
  case Why::saved: return "autograd saved the tensor, or other C++ code holds it";
  case Why::container: return "others hold the container that the tensor is in";
  case Why::base:
    return "others hold the tensor that it is a view of, or other views of that, or autograd "
           "saved one of them";
  case Why::storage:
    return "others share its memory: views that were not marked in the same call, a storage "
           "object, or what autograd saved";
  case Why::weak_references: return "weak references to the tensor or its storage exist";
  case Why::parameter: return "it is a Parameter, which modules read";
  case Why::foreign: return "its memory is shared with a storage that cannot be counted";
  case Why::subclass: return "it is sparse, or of a subclass of Tensor, or inside one";
  case Why::scope:
    return "autograd recorded an operation in the scope, or the mark is in a custom function or "
           "among hooks of saved tensors";
  case Why::traced: return "PyTorch traces the call, or a transform wraps the tensor";
  case Why::no_gil: return "references cannot be counted without a GIL";
  default: return "";
  }
}

Why look_at(PyObject *object, const at::Tensor &tensor, const References &references,
            const CallersFrame &caller)
{
  if (references.unknown != Why::nobody_else) {
    return references.unknown;
  }
#ifdef Py_GIL_DISABLED
  (void)object;
  (void)tensor;
  (void)caller;
  return Why::no_gil;
#else
  const auto *impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || !impl->unsafe_storage()) {
    return Why::subclass;
  }
  if (Py_IS_TYPE(object, reinterpret_cast<PyTypeObject *>(ParameterClass))) {
    return Why::parameter;
  }
  const bool alone =
      count_tensor(tensor, 0, object, references.now() + caller.references(object)) ==
          Why::nobody_else &&
      count_storage(tensor, 1) == Why::nobody_else;
  return alone ? Why::nobody_else : Why::uncounted;
#endif
}

void Holders::forget()
{
  for (const Given &given : given_) {
    Py_DECREF(given.object);
  }
  given_.clear();
}

void Holders::add(PyObject *object, const at::Tensor &tensor, Py_ssize_t references)
{
  given_.push_back(
      {Py_NewRef(object), &THPVariable_Unpack(object), base_of(tensor), references + 1});
}

// By storage; views come first, and all places of one tensor together.
void Holders::sort()
{
  const auto key = [](const Given &given) {
    return std::make_tuple(storage_of(*given.tensor), given.base == nullptr, given.object);
  };
  std::sort(given_.begin(), given_.end(),
            [&](const Given &a, const Given &b) { return key(a) < key(b); });
}

size_t Holders::end_of_storage(size_t first) const
{
  size_t last = first + 1;
  while (last < given_.size() &&
         storage_of(*given_[last].tensor) == storage_of(*given_[first].tensor)) {
    ++last;
  }
  return last;
}

Why Holders::count(size_t first, size_t last, const CallersFrame &caller)
{
  struct Base {
    const at::Tensor *tensor;
    size_t views;
  };
  c10::SmallVector<Base, 2> bases; // those not given themselves; nearly always one
  const auto find = [&](const at::Tensor &tensor) {
    return std::find_if(bases.begin(), bases.end(),
                        [&](const Base &base) { return base.tensor->is_same(tensor); });
  };
  size_t tensors = 0;
  for (size_t i = first, next; i < last; i = next, ++tensors) {
    const Given &given = given_[i];
    Py_ssize_t references = caller.references(given.object);
    for (next = i; next < last && given_[next].object == given.object; ++next) {
      references += given_[next].references;
    }
    size_t views = 0; // all that were given have been counted, because they come first
    const auto itself = find(*given.tensor);
    if (itself != bases.end()) {
      views = itself->views;
      bases.erase(itself);
    }
    const Why why = count_tensor(*given.tensor, views, given.object, references);
    if (why != Why::nobody_else) {
      return why;
    }
    if (given.base != nullptr) {
      const auto base = find(*given.base);
      if (base == bases.end()) {
        bases.push_back({given.base, 1});
      } else {
        ++base->views;
      }
    }
  }
  for (const Base &base : bases) {
    PyObject *object = base.tensor->unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    const Why why = count_tensor(*base.tensor, base.views, object, caller.references(object));
    if (why != Why::nobody_else) {
      return why == Why::weak_references ? why : Why::base;
    }
    ++tensors;
  }
  return count_storage(*given_[first].tensor, tensors);
}

} // namespace esper
