#include "marking.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <mutex>
#include <unordered_map>

#include "current.h"
#include "deleter.h"
#include "mark_watch.h"
#include "stream.h"
#include "the_core.h"

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

template <class Blocks>
void tell_watcher(const Blocks &blocks, const End &end, bool until_free)
{
  const MarkWatcher *watcher = mark_watcher();
  if (C10_LIKELY(watcher == nullptr)) {
    return;
  }
  for (const auto &block : blocks) {
    if (end.event) {
      watcher->marked_by_event(block.ptr, *end.event);
    } else {
      watcher->marked(block.ptr, stream_for(end, block.device), until_free);
    }
  }
}

template <class Blocks>
void tell_watcher_of_held(const Blocks &blocks)
{
  if (const MarkWatcher *watcher = mark_watcher()) {
    for (const auto &block : blocks) {
      watcher->held(block.ptr);
    }
  }
}

} // namespace

// Uses one event for all blocks that share a stream.
void Memory::mark_blocks(const Blocks &blocks, const End &end, unsigned flags)
{
  if (blocks.empty()) {
    return;
  }
  esper_core *made = core();
  c10::SmallVector<const void *, 8> group;
  // Without a stream, each device's current stream is meant.
  const bool split = !end.stream && !end.event;
  c10::SmallVector<bool, 8> done(blocks.size(), false);
  for (size_t first = 0; first < blocks.size(); ++first) {
    if (done[first]) {
      continue;
    }
    const c10::DeviceIndex device = blocks[first].device;
    group.clear();
    for (size_t i = first; i < blocks.size(); ++i) {
      if (!done[i] && (!split || blocks[i].device == device)) {
        group.push_back(blocks[i].ptr);
        done[i] = true;
      }
    }
    const esper_status status =
        end.event ? capi().record_use_event(made, group.data(), group.size(), end.event->handle,
                                            end.event->device, flags, nullptr)
                  : capi().record_use(made, group.data(), group.size(),
                                      to_esper(stream_for(end, device)), flags, nullptr);
    check(status, "record_use");
  }
  tell_watcher(blocks, end, (flags & ESPER_USE_UNTIL_FREE) != 0);
}

void Memory::mark_until_free(const Blocks &blocks, const End &end, unsigned flags)
{
  // An event does not tell its stream, which is where backward reads.
  const bool unknown = end.event && !end.stream;
  if (!unknown && end.gate_early) {
    End at_free = end;
    at_free.event.reset();
    mark_blocks(blocks, at_free, flags | ESPER_USE_UNTIL_FREE);
    return;
  }
  for (const Block &block : blocks) {
    const esper_status status =
        unknown ? capi().free_after_all(core(), const_cast<void *>(block.ptr))
                : capi().record_stream(core(), block.ptr, to_esper(stream_for(end, block.device)));
    check(status, "record_use of a tensor that autograd may have saved");
  }
  if (unknown) {
    tell_watcher_of_held(blocks);
  } else {
    tell_watcher(blocks, {end.stream, std::nullopt}, true);
  }
}

void Memory::mark(const End &end) const
{
  const unsigned flags = end.gate ? 0u : unsigned{ESPER_USE_NO_GATE};
  mark_blocks(precise_, end, flags);
  mark_until_free(until_free_, end, flags);
  for (const at::Tensor &tensor : foreign_) {
    mark_foreign(tensor, end);
  }
}

void Memory::hold_for_all_streams() const
{
  for (const Blocks *blocks : {&precise_, &until_free_}) {
    for (const Block &block : *blocks) {
      check(capi().free_after_all(core(), const_cast<void *>(block.ptr)),
            "record_use until the free");
    }
    tell_watcher_of_held(*blocks);
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

bool Memory::add(const at::Tensor &tensor, bool until_free)
{
  const c10::Device device = tensor.device();
  if (device.is_cpu() || device.is_meta()) {
    return true;
  }
  switch (tensor.layout()) {
  case at::kSparse: return add(tensor._indices(), until_free) && add(tensor._values(), until_free);
  case at::kSparseCsr:
  case at::kSparseBsr:
    return add(tensor.crow_indices(), until_free) && add(tensor.col_indices(), until_free) &&
           add(tensor.values(), until_free);
  case at::kSparseCsc:
  case at::kSparseBsc:
    return add(tensor.ccol_indices(), until_free) && add(tensor.row_indices(), until_free) &&
           add(tensor.values(), until_free);
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
  auto &blocks = until_free ? until_free_ : precise_;
  blocks.push_back({data.get(), device.index()});
  return true;
}

} // namespace esper
