// The operators that represent marks and scopes where PyTorch has to see them: in compiled graphs,
// and under tracing, fake tensors, functorch and other modes. Eager calls do not use them; use.cpp
// decides.
//
// A stream is c10's (id, device index), which means the same in every process, so compiled graphs
// may be cached. Device -1 means the current stream.
//
// No operator declares a mutation, so functionalisation keeps them and autograd ignores them.
// esper_alloc/uses/teaching.py declares them to torch.fx as effects. Inductor moves independent
// operations and reuses its buffers itself, so there are two more overloads for it:
//   ordered   also reads `after`: what must have been enqueued before
//   pinned    also declares that it writes what it marks, so that no later operation on
//             that is moved before it
//
// `in_memory` is for Inductor, too: its argument gets one buffer and is not computed again for each
// reader.
//
// Compiled code runs on the streams that its compiler chooses, which need not be those that the
// traced program named: PyTorch up to 2.11 runs everything on the stream that was current when the
// graph was called. So a mark on a stream also marks the current stream. A scope does not change
// the current stream, but orders its stream and the current one against each other on both sides.
#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "marking.h"
#include "scope.h"

namespace esper
{
namespace
{

using c10::cuda::CUDAStream;

std::optional<CUDAStream> stream_of(int64_t id, int64_t device)
{
  if (device < 0) {
    return std::nullopt;
  }
  return CUDAStream::unpack3(id, static_cast<c10::DeviceIndex>(device), c10::DeviceType::CUDA);
}

Memory memory_of(at::TensorList tensors)
{
  Memory memory;
  for (const at::Tensor &tensor : tensors) {
    memory.add(tensor);
  }
  return memory;
}

void mark(at::TensorList tensors, const std::optional<CUDAStream> &stream, bool until_free)
{
  const Memory memory = memory_of(tensors);
  if (memory.empty()) {
    return;
  }
  End end;
  // The graph may have been traced without grad mode, and run in it or in backward.
  end.until_free = until_free || autograd_may_read();
  memory.mark(end);
  if (stream) {
    end.stream = stream;
    memory.mark(end);
  }
}

void record_use(at::TensorList tensors, int64_t stream, int64_t device, bool until_free)
{
  mark(tensors, stream_of(stream, device), until_free);
}

void hold(at::TensorList tensors)
{
  const Memory memory = memory_of(tensors);
  if (!memory.empty()) {
    memory.hold_for_all_streams();
  }
}

void enter_scope(at::TensorList /*tensors*/, int64_t stream, int64_t device)
{
  if (const auto entered = stream_of(stream, device)) {
    wait_for(c10::cuda::getCurrentCUDAStream(entered->device_index()), *entered);
  }
}

void leave_scope(at::TensorList tensors, int64_t stream, int64_t device, bool until_free)
{
  const auto left = stream_of(stream, device);
  if (left) {
    wait_for(*left, c10::cuda::getCurrentCUDAStream(left->device_index()));
  }
  mark(tensors, left, until_free);
}

void take(at::TensorList tensors, int64_t stream, int64_t device)
{
  enter_scope(tensors, stream, device);
  const Memory memory = memory_of(tensors);
  if (!memory.empty()) {
    End end;
    end.until_free = true;
    memory.mark(end);
  }
}

// The same with `after`, which only the compiler looks at.
void record_use_after(at::TensorList tensors, at::TensorList /*after*/, int64_t stream,
                      int64_t device, bool until_free)
{
  record_use(tensors, stream, device, until_free);
}
void leave_scope_after(at::TensorList tensors, at::TensorList /*after*/, int64_t stream,
                       int64_t device, bool until_free)
{
  leave_scope(tensors, stream, device, until_free);
}

// Fake and meta tensors have no memory.
template <class... Arguments>
void nothing(at::TensorList, Arguments...)
{
}

at::Tensor in_memory(const at::Tensor &tensor)
{
  return tensor.clone(); // an operator may not return its argument
}
at::Tensor in_memory_of_nothing(const at::Tensor &tensor)
{
  return at::empty_strided_symint(tensor.sym_sizes(), tensor.sym_strides(), tensor.options());
}

// vmap: runs the operator on the tensors below the batched ones, at any depth.
void unbatched(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
  const size_t count = op.schema().arguments().size();
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  for (size_t i = 0; i < count; ++i) {
    c10::IValue &value = torch::jit::peek(*stack, i, count);
    if (!value.isTensorList()) {
      continue;
    }
    c10::List<at::Tensor> plain;
    for (const at::Tensor &tensor : value.toTensorVector()) {
      const auto *batched = at::functorch::maybeGetBatchedImpl(tensor);
      plain.push_back(batched == nullptr ? tensor : batched->value());
    }
    value = std::move(plain);
  }
  op.callBoxed(stack);
}

} // namespace
} // namespace esper

TORCH_LIBRARY(esper_alloc, m)
{
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
#define WHERE "int stream, int device"
#define MARK WHERE ", bool until_free) -> ()"
  m.def("record_use(Tensor[] tensors, " MARK, tags);
  m.def("record_use.ordered(Tensor[] tensors, Tensor[] after, " MARK, tags);
  m.def("record_use.pinned(Tensor(a!)[] tensors, Tensor[] after, " MARK);
  m.def("leave_scope(Tensor[] tensors, " MARK, tags);
  m.def("leave_scope.ordered(Tensor[] tensors, Tensor[] after, " MARK, tags);
  m.def("leave_scope.pinned(Tensor(a!)[] tensors, Tensor[] after, " MARK);
  m.def("enter_scope(Tensor[] tensors, " WHERE ") -> ()", tags);
  m.def("enter_scope.pinned(Tensor(a!)[] tensors, " WHERE ") -> ()");
  m.def("take(Tensor[] tensors, " WHERE ") -> ()", tags);
  m.def("take.pinned(Tensor(a!)[] tensors, " WHERE ") -> ()");
  m.def("hold(Tensor[] tensors) -> ()", tags);
  m.def("hold.pinned(Tensor(a!)[] tensors) -> ()");
  m.def("in_memory(Tensor tensor) -> Tensor", tags);
#undef MARK
#undef WHERE
}

TORCH_LIBRARY_IMPL(esper_alloc, CompositeExplicitAutograd, m)
{
  m.impl("record_use", esper::record_use);
  m.impl("record_use.ordered", esper::record_use_after);
  m.impl("record_use.pinned", esper::record_use_after);
  m.impl("leave_scope", esper::leave_scope);
  m.impl("leave_scope.ordered", esper::leave_scope_after);
  m.impl("leave_scope.pinned", esper::leave_scope_after);
  m.impl("enter_scope", esper::enter_scope);
  m.impl("enter_scope.pinned", esper::enter_scope);
  m.impl("take", esper::take);
  m.impl("take.pinned", esper::take);
  m.impl("hold", esper::hold);
  m.impl("hold.pinned", esper::hold);
  m.impl("in_memory", esper::in_memory);
}

TORCH_LIBRARY_IMPL(esper_alloc, Meta, m)
{
  using at::TensorList;
  using esper::nothing;
  m.impl("record_use", nothing<int64_t, int64_t, bool>);
  m.impl("record_use.ordered", nothing<TensorList, int64_t, int64_t, bool>);
  m.impl("record_use.pinned", nothing<TensorList, int64_t, int64_t, bool>);
  m.impl("leave_scope", nothing<int64_t, int64_t, bool>);
  m.impl("leave_scope.ordered", nothing<TensorList, int64_t, int64_t, bool>);
  m.impl("leave_scope.pinned", nothing<TensorList, int64_t, int64_t, bool>);
  m.impl("enter_scope", nothing<int64_t, int64_t>);
  m.impl("enter_scope.pinned", nothing<int64_t, int64_t>);
  m.impl("take", nothing<int64_t, int64_t>);
  m.impl("take.pinned", nothing<int64_t, int64_t>);
  m.impl("hold", nothing<>);
  m.impl("hold.pinned", nothing<>);
  m.impl("in_memory", esper::in_memory_of_nothing);
}

TORCH_LIBRARY_IMPL(esper_alloc, FuncTorchBatched, m)
{
  for (const char *name : {"record_use", "hold", "enter_scope", "leave_scope", "take"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&esper::unbatched>());
  }
}
