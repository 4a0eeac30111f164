// Marking the memory behind tensors, without Python: what record_use() and the
// operators that stand for it in compiled graphs share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "../esper_alloc.h"
#include "python_objects.h"

namespace esper
{

// When and where the marked use ends.
struct End {
  // Nothing: the current stream of each tensor's device.
  std::optional<c10::cuda::CUDAStream> stream;
  // If given, the use ends with it, and `stream` only serves what an event
  // cannot: memory of other allocators, and saved tensors.
  std::optional<RecordedEvent> event;
  bool gate = true;
};

// The core that may know foreign-looking addresses: ours, or the one under
// torch's CUDAPluggableAllocator. Null: PyTorch does not run on us.
esper_core *core_that_serves();

// The memory behind tensors of CUDA devices, found first and marked then.
class Memory
{
public:
  // `until_free`: backward may read it, so the use lasts until its free. False:
  // `tensor` is of another kind of device, CPU and meta apart, which need
  // nothing.
  bool add(const at::Tensor &tensor, bool until_free);

  bool empty() const
  {
    return precise_.empty() && until_free_.empty() && foreign_.empty();
  }

  // Without the GIL. May be called again, for another end.
  void mark(const End &end) const;

  // For an end that nobody can name: each block is held, after its free, until
  // all work that its device has by then is done.
  void hold_for_all_streams() const;

private:
  struct Block {
    const void *ptr;
    c10::DeviceIndex device;
  };
  using Blocks = c10::SmallVector<Block, 8>;

  static void mark_precise(const Blocks &blocks, const End &end);
  static void mark_until_free(const Blocks &blocks, const End &end);

  Blocks precise_;
  Blocks until_free_;
  c10::SmallVector<at::Tensor, 1> foreign_; // CUDA memory that is not ours
};

} // namespace esper
