// Marks the memory behind tensors, without Python. Used by record_use() and by the operators that
// represent it in compiled graphs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "../esper_alloc.h"
#include "python_objects.h"

namespace esper
{

// When and where a marked use ends.
struct End {
  // None: the current stream of each tensor's device.
  std::optional<c10::cuda::CUDAStream> stream;
  // If given, the use ends with this event. `stream` is then only for memory that an event cannot
  // protect: that of other allocators, and of saved tensors.
  std::optional<RecordedEvent> event;
  bool gate = true;
  // False: uses until the free are gated on only when memory cannot grow, as by record_stream,
  // because the caller said nothing of other work of the stream.
  bool gate_early = true;
};

// The core that may own memory with an unknown deleter: this one, or the one under torch's
// CUDAPluggableAllocator. Null: PyTorch does not use esper_alloc.
esper_core *core_that_serves();

// The memory behind CUDA tensors: found first, then marked.
class Memory
{
public:
  // `until_free`: backward may read the memory, so the use lasts until the free. False: `tensor` is
  // on another kind of device. CPU and meta tensors are accepted and need nothing.
  bool add(const at::Tensor &tensor, bool until_free);

  bool empty() const
  {
    return precise_.empty() && until_free_.empty() && foreign_.empty();
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
  using Blocks = c10::SmallVector<Block, 8>;

  static void mark_blocks(const Blocks &blocks, const End &end, unsigned flags);
  static void mark_until_free(const Blocks &blocks, const End &end, unsigned flags);

  Blocks precise_;
  Blocks until_free_;
  c10::SmallVector<at::Tensor, 1> foreign_; // CUDA memory of other allocators
};

} // namespace esper
