// Checkpoints of private pools. torch.compile(mode="reduce-overhead"), whose graphs share one pool,
// takes one after each recording and restores it before the next.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <memory>
#include <unordered_set>

namespace esper
{

std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> take_checkpoint(
    c10::DeviceIndex device, c10::MempoolId_t pool);

c10::cuda::CUDACachingAllocator::CheckpointDelta restore_checkpoint(
    c10::DeviceIndex device,
    const std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> &state);

// Whether exactly these blocks of the pool are live.
bool pool_live_are(c10::DeviceIndex device, c10::MempoolId_t pool,
                   const std::unordered_set<void *> &expected);

} // namespace esper
