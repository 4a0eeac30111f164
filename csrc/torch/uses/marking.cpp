#include "marking.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <unordered_map>

#include "../base/current.h"
#include "../base/stream.h"
#include "../memory/deleter.h"
#include "../start/the_core.h"
#include "mark_watch.h"

namespace esper
{

esper_core *core_that_serves()
{
  if (is_current()) {
    return core_if_made();
  }
  // Under another allocator the core may provide segments for its MemPools. That allocator must
  // protect the memory in them.
  return c10::cuda::CUDACachingAllocator::name() == "pluggable" ? core() : nullptr;
}

namespace
{

using c10::cuda::CUDAStream;

bool is_ours(const c10::DataPtr &data)
{
  if (data.get_deleter() == &delete_memory) {
    return true;
  }
  // Memory of the core may also have other deleters: from DLPack, copy-on-write, the pluggable
  // allocator.
  esper_core *made = core_that_serves();
  esper_block_info block;
  return made != nullptr && capi().find_block(made, data.get(), &block) == ESPER_OK && block.live;
}

CUDAStream stream_for(const End &end, c10::DeviceIndex device)
{
  return end.stream ? *end.stream : c10::cuda::getCurrentCUDAStream(device);
}

// A stream whose work ends with `event`, for allocators that know only streams. Each device has one
// for this purpose, so that no stream of the user waits.
CUDAStream stream_behind(const RecordedEvent &event)
{
  static std::mutex mutex;
  static auto *streams = new std::unordered_map<c10::DeviceIndex, cudaStream_t>();
  std::lock_guard<std::mutex> lock(mutex);
  c10::cuda::CUDAGuard guard(event.device);
  cudaStream_t &stream = (*streams)[event.device];
  if (stream == nullptr) {
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event.handle, 0));
  // Who traces the order of streams, such as the auditor, is told as of PyTorch's own waits.
  if (const c10::impl::PyInterpreter *tracer = c10::impl::GPUTrace::get_trace()) {
    (*tracer)->trace_gpu_event_wait(c10::kCUDA, reinterpret_cast<uintptr_t>(event.handle),
                                    reinterpret_cast<uintptr_t>(stream));
  }
  return c10::cuda::getStreamFromExternal(stream, event.device);
}

void mark_foreign(const at::Tensor &tensor, const End &end)
{
  const CUDAStream stream = end.event && !end.stream ? stream_behind(*end.event)
                                                     : stream_for(end, tensor.device().index());
  tensor.record_stream(stream.unwrap());
}

unsigned flags_of(bool until_free)
{
  return until_free ? unsigned{ESPER_USE_UNTIL_FREE} : 0u;
}

template <class Pointers>
void tell(const MarkWatcher &watcher, const Pointers &marked, const End &end,
          c10::DeviceIndex device)
{
  for (const void *ptr : marked) {
    if (end.event) {
      watcher.marked_by_event(ptr, *end.event);
    } else {
      watcher.marked(ptr, stream_for(end, device), end.until_free);
    }
  }
}

} // namespace

bool autograd_may_read()
{
  return at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() != -1;
}

const void *plain_memory(const at::Tensor &tensor)
{
  const auto *impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) {
    return nullptr; // sparse, or a wrapper
  }
  c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
  const c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &delete_memory ? data.get() : nullptr;
}

void mark_plain_memory(const void *memory, CUDAStream stream, bool until_free)
{
  check(capi().record_use(core(), &memory, 1, to_esper(stream), flags_of(until_free), nullptr),
        "record_use");
  if (const MarkWatcher *watcher = mark_watcher()) {
    watcher->marked(memory, stream, until_free);
  }
}

// Blocks that share a stream share one event.
void Memory::mark(const End &end) const
{
  const MarkWatcher *watcher = mark_watcher();
  c10::SmallVector<const void *, 8> group;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const c10::DeviceIndex device = blocks_[i].device;
    group.push_back(blocks_[i].ptr);
    const bool is_last = i + 1 == blocks_.size();
    // Without a stream, each device's current stream is meant.
    if (!is_last && (end.stream || end.event || blocks_[i + 1].device == device)) {
      continue;
    }
    if (end.event) {
      check(capi().record_use_event(core(), group.data(), group.size(), end.event->handle,
                                    end.event->device, nullptr),
            "record_use");
    } else {
      check(capi().record_use(core(), group.data(), group.size(), to_esper(stream_for(end, device)),
                              flags_of(end.until_free), nullptr),
            "record_use");
    }
    if (watcher != nullptr) {
      tell(*watcher, group, end, device);
    }
    group.clear();
  }
  for (const at::Tensor &tensor : foreign_) {
    mark_foreign(tensor, end);
  }
}

void Memory::hold_for_all_streams() const
{
  const MarkWatcher *watcher = mark_watcher();
  for (const Block &block : blocks_) {
    check(capi().free_after_all(core(), const_cast<void *>(block.ptr)),
          "record_use until the free");
    if (watcher != nullptr) {
      watcher->held(block.ptr);
    }
  }
  for (const at::Tensor &tensor : foreign_) {
    // Its allocator knows only streams, and the stream is unknown, so the use is made to end here.
    // (In a capture nothing can be waited for.)
    const c10::cuda::CUDAGuard guard(tensor.device());
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
      c10::cuda::device_synchronize();
    }
  }
}

bool Memory::add(const at::Tensor &tensor)
{
  const c10::Device device = tensor.device();
  if (device.is_cpu() || device.is_meta()) {
    return true;
  }
  switch (tensor.layout()) {
  case at::kSparse: return add(tensor._indices()) && add(tensor._values());
  case at::kSparseCsr:
  case at::kSparseBsr:
    return add(tensor.crow_indices()) && add(tensor.col_indices()) && add(tensor.values());
  case at::kSparseCsc:
  case at::kSparseBsc:
    return add(tensor.ccol_indices()) && add(tensor.row_indices()) && add(tensor.values());
  default: break;
  }
  if (C10_UNLIKELY(!device.is_cuda())) {
    return false;
  }
  const auto *impl = tensor.unsafeGetTensorImpl();
  if (C10_UNLIKELY(!impl->has_storage())) {
    foreign_.push_back(tensor);
    return true;
  }
  const c10::DataPtr &data =
      impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get() == nullptr) {
    return true;
  }
  if (C10_UNLIKELY(!is_ours(data))) {
    foreign_.push_back(tensor);
    return true;
  }
  blocks_.push_back({data.get(), device.index()});
  return true;
}

} // namespace esper
