// What esper_alloc cannot do yet. Each raises, naming itself and what asks for
// it; none is silently ignored. The list shrinks as the core grows.
#include "allocator.h"
#include "unsupported.h"

namespace esper {

void throw_unsupported(const char* method, const char* asked_by) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "esper_alloc does not support ",
      method,
      " yet, which ",
      asked_by,
      " need; run this program on PyTorch's native allocator for now.");
}

namespace {

constexpr const char* sharing =
    "torch.multiprocessing queues and other CUDA tensors shared between "
    "processes";

} // namespace

native::ShareableHandle Allocator::shareIpcHandle(void* /*ptr*/) {
  throw_unsupported("shareIpcHandle", sharing);
}

std::shared_ptr<void> Allocator::getIpcDevPtr(std::string /*handle*/) {
  throw_unsupported("getIpcDevPtr", sharing);
}

void Allocator::attachAllocatorTraceTracker(
    native::AllocatorTraceTracker /*tracker*/) {
  throw_unsupported(
      "attachAllocatorTraceTracker",
      "NCCL's tensor registration and other watchers of segments");
}

void Allocator::attachOomRejectionObserver(
    native::OutOfMemoryObserver /*observer*/) {
  throw_unsupported(
      "attachOomRejectionObserver", "watchers of throw_on_cudamalloc_oom");
}

c10::DataPtr Allocator::allocateWithAddress(
    size_t /*size*/,
    void* /*address*/) {
  throw_unsupported("allocateWithAddress", "placed allocations");
}

} // namespace esper
