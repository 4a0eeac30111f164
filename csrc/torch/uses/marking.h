// Marks the memory behind tensors, without Python. Used by record_use() and by the operators that
// represent it in compiled graphs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "../../esper_alloc.h"
#include "../base/python_objects.h"

namespace esper
{

// When and where a marked use ends.
struct End {
  // None: the current stream of each tensor's device.
  std::optional<c10::cuda::CUDAStream> stream;
  // If given, the use ends with this event. `stream` is then only for memory of other allocators.
  std::optional<RecordedEvent> event;
  // The use lasts until the free. Not with an event.
  bool until_free = false;
};

// Whether backward may read later what this thread marks now: in grad mode autograd may have saved
// it, and in backward, where grad mode is off, a node that runs later may have.
bool autograd_may_read();

// The core that may own memory with an unknown deleter: this one, or the one under torch's
// CUDAPluggableAllocator. Null: PyTorch does not use esper_alloc.
esper_core *core_that_serves();

// The memory of a tensor of a CUDA device that comes from this allocator. Null: there is none, or
// Memory has to look for it.
const void *plain_memory(const at::Tensor &tensor);
// Marks that memory. To be called without the GIL.
void mark_plain_memory(const void *memory, c10::cuda::CUDAStream stream, bool until_free);

// The memory behind CUDA tensors: found first, then marked.
class Memory
{
public:
  // False: `tensor` is on another kind of device. CPU and meta tensors are accepted and need
  // nothing.
  bool add(const at::Tensor &tensor);

  bool empty() const
  {
    return blocks_.empty() && foreign_.empty();
  }

  // To be called without the GIL. May be called again for another end.
  void mark(const End &end) const;

  // For an unknown end: holds each block, after its free, until all work that its device has by
  // then is done.
  void hold_for_all_streams() const;

private:
  struct Block {
    const void *ptr;
    c10::DeviceIndex device;
  };

  c10::SmallVector<Block, 8> blocks_;
  c10::SmallVector<at::Tensor, 1> foreign_; // CUDA memory of other allocators
};

} // namespace esper
