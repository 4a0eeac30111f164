// The allocator that PyTorch calls. It only translates between PyTorch and the core (the_core.h):
// sizes, streams and results. Each group of methods names the file where it stands.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace esper
{

namespace native = c10::cuda::CUDACachingAllocator;

class Allocator final : public native::CUDAAllocator
{
public:
  // ../allocator/allocator.cpp

  Allocator();

  // These use the current stream of the current device unless a parameter says otherwise.
  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void *raw_alloc(size_t size) override;
  void *raw_alloc_with_stream(size_t size, cudaStream_t stream) override;
  void raw_delete(void *ptr) override;
  void copy_data(void *to, const void *from, std::size_t count) const override;
  void recordStream(const c10::DataPtr &data, c10::cuda::CUDAStream stream) override;
  using native::CUDAAllocator::recordStream; // the c10::Stream overload
  void *getBaseAllocation(void *ptr, size_t *size) override;

  void init(int device_count) override;
  bool initialized() override;
  std::string name() override;

  // While off, all memory comes from the CUDA runtime (../allocator/uncached.h).
  void enable(bool value) override;
  bool isEnabled() const override;

  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void cacheInfo(c10::DeviceIndex device, size_t *largest) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;

  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override;
  cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device, size_t count,
                          cudaStream_t stream, bool peer_access) override;

  // IPC: ../ipc/sharing.cpp has the steps.
  native::ShareableHandle shareIpcHandle(void *ptr) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;

  // Without `override`, here and below, because they are virtual in the base only from PyTorch 2.12
  // on or later.
  void markCaptureBegin(c10::DeviceIndex device);
  void markCaptureEnd(c10::DeviceIndex device);
  c10::DataPtr allocateWithAddress(size_t size, void *address);

  // ../reporting/statistics.cpp: torch.cuda.memory_stats()
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;

  // ../reporting/snapshot.cpp: torch.cuda.memory._snapshot(). Pool {0, 0}: all.
  native::SnapshotInfo snapshot(c10::MempoolId_t pool = {0, 0},
                                bool include_traces = true) override;
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override;

  // ../reporting/out_of_memory.cpp. The second observer is called for requests that
  // throw_on_cudamalloc_oom makes the core reject without asking the device. It gets the device,
  // the bytes that would have been requested from it, the bytes reserved, and the device's total.
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override;
  void attachOomRejectionObserver(native::OutOfMemoryObserver observer);

  // ../reporting/history.cpp: _record_memory_history(). Frames are gathered for the actions of
  // `when`.
  bool isHistoryEnabled() override;
  void recordHistory(bool enabled, native::CreateContextFn context_recorder, size_t max_entries,
                     native::RecordContext when, bool clear_history,
                     const std::vector<std::string> &skip_actions) override;
  void recordAnnotation(
      const std::vector<std::pair<std::string, std::string>> &annotation) override;
  // What the calling thread's entries say besides: the region that it compiles, and a text of the
  // program's.
  void pushCompileContext(std::string &context) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string &metadata) override;
  std::string getUserMetadata() override;
  bool supportsUserMetadata();
  // For live memory. Where there is none, the first throws, and the second returns null.
  void annotateMemory(const void *ptr, const std::string &metadata);
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void *ptr);
  // The tracker is called with each entry, recorded or not: nccl_registration.h.
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override;

  // ../memory/pools.cpp: private pools, the memory of CUDA graphs and of torch.cuda.MemPool.
  // Between begin and end, a pool serves the allocations that its filter claims. `segments`: where
  // its segments come from; null: from the core.
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  // Destructors of MemPools and graphs call these three. They do nothing in a forked child, where
  // the pools are the parent's.
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override;
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<native::CUDAAllocator> segments = nullptr) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override;

  // ../memory/checkpoints.cpp: torch.compile(mode="reduce-overhead"), whose graphs share one pool,
  // takes a checkpoint after each recording and restores it before the next.
  // Whether exactly the `expected` blocks of the pool are live.
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void *> &expected) override;
  std::shared_ptr<native::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                             c10::MempoolId_t pool) override;
  native::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<native::AllocatorState> state) override;

private:
  std::atomic<bool> caching_{true};
  const bool uncached_; // PYTORCH_NO_CUDA_MEMORY_CACHING
  std::atomic<bool> initialized_{false};
};

// The one instance. It lives until the process ends.
Allocator &allocator();

} // namespace esper
