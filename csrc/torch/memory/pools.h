// Private pools: the memory of CUDA graphs and of torch.cuda.MemPool. Between begin and end, a
// pool serves the allocations that its filter claims. Its segments may come from an allocator of
// its own.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <functional>
#include <memory>

namespace esper
{

// Makes the pool, or counts one more user of it. `segments`: where its segments come from; null:
// from the core.
void create_pool(c10::DeviceIndex device, c10::MempoolId_t pool,
                 std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> segments);

void begin_pool(c10::DeviceIndex device, c10::MempoolId_t pool,
                std::function<bool(cudaStream_t)> filter);
void end_pool(c10::DeviceIndex device, c10::MempoolId_t pool);

// Destructors of MemPools and graphs call these three. They do nothing in a forked child, where the
// pools are the parent's.
void release_pool(c10::DeviceIndex device, c10::MempoolId_t pool);
int pool_use_count(c10::DeviceIndex device, c10::MempoolId_t pool);
void set_use_on_oom(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom);

void set_no_split(c10::DeviceIndex device, c10::MempoolId_t pool);

// Rethrows the exception that a pool's filter or allocator threw in the calling thread's last
// malloc, if any.
void rethrow_callback_failure();

} // namespace esper
