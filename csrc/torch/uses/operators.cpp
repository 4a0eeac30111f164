// The operators that represent marks and scopes where PyTorch has to see them: in compiled graphs,
// and under tracing, fake tensors, functorch and other modes. Eager calls do not use them; use.cpp
// decides.
//
// A stream is c10's (id, device index), which means the same in every process, so compiled graphs
// may be cached. Device -1 means the current stream, and -2 all streams, after the free.
//
// No operator declares a mutation, so functionalisation keeps them and autograd ignores them.
// esper_alloc/uses/teaching.py declares them to torch.fx as effects. The others are for Inductor
// (esper_alloc/uses/inductor.py): `in_memory` asks for one buffer for its argument, `order.pinned`
// declares that it writes what it is given, so that no operation on that passes it, and
// `record_use.again` is forward's mark in backward. `place` tells equal calls apart, which
// PyTorch 2.11 would merge.
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

constexpr int64_t all_streams = -2;

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

void record_use_operator(at::TensorList tensors, int64_t stream, int64_t device, bool until_free)
{
  const Memory memory = memory_of(tensors);
  if (memory.empty()) {
    return;
  }
  if (device == all_streams) {
    memory.hold_for_all_streams();
    return;
  }
  End end;
  // The graph may have been traced without grad mode, and run in it or in backward.
  end.until_free = until_free || autograd_may_read();
  memory.mark(end);
  end.stream = stream_of(stream, device);
  if (end.stream) {
    memory.mark(end);
  }
}

// At a scope's beginning, and where its results are taken, the current stream waits for the
// scope's; at its end the scope's waits for the current one. The tensors only say what must stay on
// which side. Without a stream nothing waits: the call only keeps the sides apart.
void order(at::TensorList /*tensors*/, int64_t stream, int64_t device, bool at_end,
           int64_t /*place*/)
{
  const auto scope = stream_of(stream, device);
  if (!scope) {
    return;
  }
  const CUDAStream current = c10::cuda::getCurrentCUDAStream(scope->device_index());
  if (at_end) {
    wait_for(*scope, current);
  } else {
    wait_for(current, *scope);
  }
}

// For fake and meta tensors, which have no memory, and for what is only Inductor's to see.
template <class... Arguments>
void nothing(at::TensorList, Arguments...)
{
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
  m.def("record_use(Tensor[] tensors, int stream, int device, bool until_free) -> ()", tags);
  m.def("record_use.again(Tensor[] tensors, int stream, int device, int place) -> ()", tags);
  m.def("order(Tensor[] tensors, int stream, int device, bool at_end, int place=0) -> ()", tags);
  m.def("order.pinned(Tensor(a!)[] tensors, int stream, int device, bool at_end, "
        "int place=0) -> ()");
  m.def("in_memory(Tensor[] tensors) -> ()", tags);
}

TORCH_LIBRARY_IMPL(esper_alloc, CompositeExplicitAutograd, m)
{
  m.impl("record_use", esper::record_use_operator);
  m.impl("record_use.again", esper::nothing<int64_t, int64_t, int64_t>);
  m.impl("order", esper::order);
  m.impl("order.pinned", esper::order);
  m.impl("in_memory", esper::nothing<>);
}

TORCH_LIBRARY_IMPL(esper_alloc, Meta, m)
{
  m.impl("record_use", esper::nothing<int64_t, int64_t, bool>);
  m.impl("record_use.again", esper::nothing<int64_t, int64_t, int64_t>);
  m.impl("order", esper::nothing<int64_t, int64_t, bool, int64_t>);
  m.impl("order.pinned", esper::nothing<int64_t, int64_t, bool, int64_t>);
  m.impl("in_memory", esper::nothing<>);
}

TORCH_LIBRARY_IMPL(esper_alloc, FuncTorchBatched, m)
{
  for (const char *name : {"record_use", "order"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&esper::unbatched>());
  }
}

// Autograd has a key of its own for nested tensors, and nothing to do there.
TORCH_LIBRARY_IMPL(esper_alloc, AutogradNestedTensor, m)
{
  for (const char *name : {"record_use", "order"}) {
    m.impl(name, torch::CppFunction::makeFallthrough());
  }
}
