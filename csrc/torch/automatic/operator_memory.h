// Finds the memory that an operator of PyTorch's is about to work on, and the stream that it will
// run on. Runs no Python and calls no operator.
//
// What wants to know registers a callback of at::RecordFunction for the start of each operator that
// asks for the inputs, and passes them to each_storage() or each_access(). PyTorch calls it for
// nested operators too, and for those of backward, on the thread and with the current stream that
// they run on. Results that an operator allocates are not among its inputs: they belong to the
// current stream. Results that it writes in place or to `out` are.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/cuda/CUDAStream.h>

namespace esper
{

// Memory that an operator is about to read or write.
struct Access {
  const void *data; // the first byte of the storage
  c10::cuda::CUDAStream stream;
  const c10::TensorImpl &tensor;
};

namespace detail
{

inline bool is_cuda(const c10::TensorImpl &tensor)
{
  // Asking for the device may run Python: that of a subclass.
  return tensor.key_set().has_backend(c10::BackendComponent::CUDABit);
}

// The tensors that a sparse tensor consists of: at most three.
struct SparseParts {
  at::Tensor part[3];
};
SparseParts sparse_parts(const c10::TensorImpl &tensor);

} // namespace detail

// Calls `see` with the first byte of the tensor's storage, its device and the tensor, if it is a
// CUDA tensor with memory. Wrappers (of functorch, functionalisation and subclasses) have none:
// operators on what they wrap follow.
template <class See>
void each_storage(const c10::TensorImpl &tensor, const See &see)
{
  if (!detail::is_cuda(tensor)) {
    return;
  }
  c10::StorageImpl *storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (C10_LIKELY(storage != nullptr)) {
    const c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
    if (data.get() != nullptr && data.device().is_cuda()) {
      see(data.get(), data.device().index(), tensor);
    }
    return;
  }
  for (const at::Tensor &part : detail::sparse_parts(tensor).part) {
    if (part.defined()) {
      each_storage(*part.unsafeGetTensorImpl(), see);
    }
  }
}

// Whether each_storage looks into it.
inline bool may_hold_tensors(const c10::IValue &value)
{
  return value.isTensor() || value.isList() || value.isTuple() || value.isGenericDict();
}

// The same for an argument of an operator: a tensor, or a list, tuple or dictionary of them, nested
// to any depth.
template <class See>
void each_storage(const c10::IValue &value, const See &see)
{
  if (value.isTensor()) {
    each_storage(*value.unsafeToTensorImpl(), see);
  } else if (value.isList()) {
    for (const c10::IValue &element : value.toListRef()) {
      if (may_hold_tensors(element)) {
        each_storage(element, see);
      } else if (!element.isNone()) {
        return; // a list of numbers
      }
    }
  } else if (value.isTuple()) {
    for (const c10::IValue &element : value.toTupleRef().elements()) {
      each_storage(element, see);
    }
  } else if (value.isGenericDict()) {
    for (const auto &item : value.toGenericDict()) {
      each_storage(item.value(), see);
    }
  }
}

// Calls `see` with an Access to the memory of a tensor or an argument, as each_storage does.
template <class Value, class See>
void each_access(const Value &value, const See &see)
{
  each_storage(value,
               [&see](const void *data, c10::DeviceIndex device, const c10::TensorImpl &tensor) {
                 see(Access{data, c10::cuda::getCurrentCUDAStream(device), tensor});
               });
}

} // namespace esper
