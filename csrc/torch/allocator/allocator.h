// The allocator that PyTorch calls. It only translates between PyTorch and the core (the_core.h):
// sizes, streams and results. Memory, streams, limits and copies are translated in allocator.cpp,
// all else in files by subject, which do not know this class.
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

  // While off, all memory comes from the CUDA runtime (uncached.h).
  void enable(bool value) override;
  bool isEnabled() const override;

  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void cacheInfo(c10::DeviceIndex device, size_t *largest) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override;

  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override;
  cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device, size_t count,
                          cudaStream_t stream, bool peer_access) override;

  // statistics.h
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;

  // snapshot.h
  native::SnapshotInfo snapshot(c10::MempoolId_t pool = {0, 0},
                                bool include_traces = true) override;
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override;

  // history.h
  bool isHistoryEnabled() override;
  void recordHistory(bool enabled, native::CreateContextFn context_recorder, size_t max_entries,
                     native::RecordContext when, bool clear_history,
                     const std::vector<std::string> &skip_actions) override;
  void recordAnnotation(
      const std::vector<std::pair<std::string, std::string>> &annotation) override;
  void pushCompileContext(std::string &context) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string &metadata) override;
  std::string getUserMetadata() override;
  // nccl_registration.h
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override;

  // sharing.h: IPC
  native::ShareableHandle shareIpcHandle(void *ptr) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;

  // pools.h: MemPools and the pools of CUDA graphs
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<native::CUDAAllocator> segments = nullptr) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override;

  // checkpoints.h
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void *> &expected) override;
  std::shared_ptr<native::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                             c10::MempoolId_t pool) override;
  native::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<native::AllocatorState> state) override;

  // Without `override`, because they are virtual in the base only from PyTorch 2.12 on or later.
  // There the observer's type has another name.
  void markCaptureBegin(c10::DeviceIndex device);
  void markCaptureEnd(c10::DeviceIndex device);
  void attachOomRejectionObserver(native::OutOfMemoryObserver observer);
  c10::DataPtr allocateWithAddress(size_t size, void *address);
  bool supportsUserMetadata();
  void annotateMemory(const void *ptr, const std::string &metadata);
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void *ptr);

private:
  std::atomic<bool> caching_{true};
  const bool uncached_; // PYTORCH_NO_CUDA_MEMORY_CACHING
  std::atomic<bool> initialized_{false};
};

// The one instance. It lives until the process ends.
Allocator &allocator();

} // namespace esper
