// torch.cuda.memory._snapshot(): the core's snapshot in PyTorch's structure, which memory_viz and
// other viewers read.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <vector>

namespace esper
{

// Of one pool; {0, 0}: of all.
c10::cuda::CUDACachingAllocator::SnapshotInfo take_snapshot(c10::MempoolId_t pool,
                                                            bool include_traces);

std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> mapped_segment_sizes(
    c10::DeviceIndex device);

} // namespace esper
