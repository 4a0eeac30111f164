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

constexpr const char* graph_trees = "torch.compile's CUDA graph trees";

} // namespace

bool Allocator::checkPoolLiveAllocations(
    c10::DeviceIndex /*device*/,
    c10::MempoolId_t /*pool*/,
    const std::unordered_set<void*>& /*expected*/) {
  throw_unsupported("checkPoolLiveAllocations", graph_trees);
}

std::shared_ptr<native::AllocatorState> Allocator::getCheckpointState(
    c10::DeviceIndex /*device*/,
    c10::MempoolId_t /*pool*/) {
  throw_unsupported("getCheckpointState", graph_trees);
}

native::CheckpointDelta Allocator::setCheckpointPoolState(
    c10::DeviceIndex /*device*/,
    std::shared_ptr<native::AllocatorState> /*state*/) {
  throw_unsupported("setCheckpointPoolState", graph_trees);
}

c10::DataPtr Allocator::allocateWithAddress(
    size_t /*size*/,
    void* /*address*/) {
  throw_unsupported("allocateWithAddress", "placed allocations");
}

} // namespace esper
