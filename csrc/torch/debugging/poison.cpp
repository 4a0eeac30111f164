#include "poison.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../base/core_api.h"
#include "../base/gil.h"
#include "../base/stream.h"
#include "sites.h"

namespace esper
{

namespace poison
{

namespace
{

using c10::cuda::CUDAStream;

constexpr int fill_byte = 0xff; // NaN in every type of floating point
constexpr size_t chunk = size_t{4} << 20;

// What is known of a live block.
struct Live {
  uint32_t allocated; // site
  bool is_unknown = false;
  c10::SmallVector<CUDAStream, 2> marks;
};

struct Filled {
  uintptr_t end;
  LateWrite history; // of the block that was there
};

struct Poison {
  std::mutex mutex;
  void (*report)(const LateWrite &) = nullptr;
  Search search = nullptr;
  std::unordered_map<uintptr_t, Live> live;
  std::map<uintptr_t, Filled> filled;            // by first address; they do not overlap
  uint64_t frees = 0;                            // of segments, when `filled` was last right
  std::unordered_map<int, cudaStream_t> streams; // by device: for fills after marks
};

Poison &state()
{
  static auto *instance = new Poison();
  return *instance;
}

// How often memory of a segment has gone back to the driver. Its addresses may come again.
uint64_t segment_frees(const esper_core *made)
{
  static const int call = [] {
    int i = 0;
    for (const char *name = nullptr; (name = capi().driver_call_name(i)) != nullptr; ++i) {
      if (std::strcmp(name, "memory_free") == 0) {
        break;
      }
    }
    return i;
  }();
  return capi().driver_calls(made, call);
}

bool is_captured(cudaStream_t stream)
{
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    (void)cudaGetLastError();
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

// A stream of this module's that waits for the home stream and for the marked ones.
cudaStream_t stream_behind(Poison &p, const esper_block_info &block, const Live &live)
{
  cudaStream_t &stream = p.streams[block.device];
  if (stream == nullptr) {
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0));
  }
  const auto wait_for = [&](cudaStream_t other, c10::DeviceIndex device) {
    const c10::cuda::CUDAGuard guard(device);
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    C10_CUDA_CHECK(cudaEventRecord(event, other));
    const c10::cuda::CUDAGuard back(static_cast<c10::DeviceIndex>(block.device));
    C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
    C10_CUDA_CHECK(cudaEventDestroy(event));
  };
  wait_for(static_cast<cudaStream_t>(block.stream), static_cast<c10::DeviceIndex>(block.device));
  for (const CUDAStream &mark : live.marks) {
    wait_for(mark.stream(), mark.device_index());
  }
  return stream;
}

bool may_fill(const esper_block_info &block, const Live &live)
{
  if (live.is_unknown || block.mapped != 0 || block.pool[0] != 0 || block.pool[1] != 0 ||
      is_captured(static_cast<cudaStream_t>(block.stream))) {
    return false;
  }
  return std::none_of(live.marks.begin(), live.marks.end(),
                      [](const CUDAStream &mark) { return is_captured(mark.stream()); });
}

// The use keeps the block from serving before the fill is over.
void fill(Poison &p, esper_core *made, const esper_block_info &block, const Live &live)
{
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(block.device));
  if (live.marks.empty()) {
    C10_CUDA_CHECK(cudaMemsetAsync(block.address, fill_byte, block.size,
                                   static_cast<cudaStream_t>(block.stream)));
    return;
  }
  const cudaStream_t stream = stream_behind(p, block, live);
  C10_CUDA_CHECK(cudaMemsetAsync(block.address, fill_byte, block.size, stream));
  const void *address = block.address;
  check(capi().record_use(made, &address, 1,
                          make_stream(stream, static_cast<c10::DeviceIndex>(block.device), true), 0,
                          nullptr),
        "poison");
}

// A word of page-locked memory, which lives on; null if there is none.
unsigned long long *page_locked_word()
{
  void *word = nullptr;
  if (cudaHostAlloc(&word, sizeof(unsigned long long), cudaHostAllocPortable) != cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return static_cast<unsigned long long *>(word);
}

// The address of the first bytes that the GPU finds to be no poison; `end`: there are none. If no
// kernel can look, `begin`: the host then looks at everything. Waits for the stream.
uintptr_t first_suspect(Search search, uintptr_t begin, uintptr_t end, cudaStream_t stream)
{
  if (search == nullptr) {
    return begin;
  }
  // The driver may load the kernel now, which would end a capture of another thread.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  static volatile unsigned long long *const least = page_locked_word();
  if (least == nullptr) {
    return begin;
  }
  *least = end - begin;
  if (search(reinterpret_cast<const void *>(begin), end - begin, fill_byte,
             const_cast<unsigned long long *>(least), stream) != cudaSuccess) {
    return begin;
  }
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return begin + *least;
}

// The first byte of [begin, end) that is no poison, or `end`. Waits for the stream.
uintptr_t first_written(Search search, uintptr_t begin, uintptr_t end, cudaStream_t stream)
{
  static std::mutex mutex;
  static std::vector<unsigned char> host(chunk);
  static const std::vector<unsigned char> expected(chunk, fill_byte);
  std::lock_guard<std::mutex> lock(mutex);
  for (uintptr_t at = first_suspect(search, begin, end, stream); at < end; at += chunk) {
    const size_t size = std::min(chunk, static_cast<size_t>(end - at));
    C10_CUDA_CHECK(cudaMemcpyAsync(host.data(), reinterpret_cast<const void *>(at), size,
                                   cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    if (std::memcmp(host.data(), expected.data(), size) != 0) {
      const auto wrong = std::find_if(host.begin(), host.end(),
                                      [](unsigned char byte) { return byte != fill_byte; });
      return at + static_cast<size_t>(wrong - host.begin());
    }
  }
  return end;
}

struct Piece {
  uintptr_t begin, end;
  LateWrite history;
};

// What of [begin, end) is filled. It is not any more: somebody else owns it now.
std::vector<Piece> take_filled(Poison &p, uintptr_t begin, uintptr_t end)
{
  std::vector<Piece> taken;
  auto at = p.filled.upper_bound(begin);
  if (at != p.filled.begin() && std::prev(at)->second.end > begin) {
    --at;
  }
  while (at != p.filled.end() && at->first < end) {
    const uintptr_t first = at->first;
    const Filled filled = at->second;
    at = p.filled.erase(at);
    taken.push_back({std::max(first, begin), std::min(filled.end, end), filled.history});
    if (first < begin) {
      p.filled.emplace(first, Filled{begin, filled.history});
    }
    if (filled.end > end) {
      at = p.filled.emplace(end, Filled{filled.end, filled.history}).first;
    }
  }
  return taken;
}

} // namespace

void turn_on(void (*report)(const LateWrite &), Search search)
{
  Poison &p = state();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.report = report;
  p.search = search;
  p.live.clear();
  p.filled.clear();
  set_watcher(Watcher::POISON, report != nullptr);
}

void marked(const void *ptr, CUDAStream stream)
{
  if (!is_on()) {
    return; // also in a forked child, where the lock may be held for ever
  }
  Poison &p = state();
  std::lock_guard<std::mutex> lock(p.mutex);
  const auto found = p.live.find(reinterpret_cast<uintptr_t>(ptr));
  if (found == p.live.end()) {
    return;
  }
  auto &marks = found->second.marks;
  if (std::find(marks.begin(), marks.end(), stream) == marks.end()) {
    marks.push_back(stream);
  }
}

void marked_for_unknown(const void *ptr)
{
  if (!is_on()) {
    return;
  }
  Poison &p = state();
  std::lock_guard<std::mutex> lock(p.mutex);
  const auto found = p.live.find(reinterpret_cast<uintptr_t>(ptr));
  if (found != p.live.end()) {
    found->second.is_unknown = true;
  }
}

void detail::after_malloc(void *ptr, cudaStream_t stream, int device)
{
  esper_core *made = core_if_made();
  esper_block_info block;
  if (made == nullptr || capi().find_block(made, ptr, &block) != ESPER_OK) {
    return;
  }
  Live live;
  live.allocated = sites::now();
  const auto begin = reinterpret_cast<uintptr_t>(block.address);
  std::vector<Piece> pieces;
  void (*report)(const LateWrite &) = nullptr;
  Search search = nullptr;
  {
    Poison &p = state();
    std::lock_guard<std::mutex> lock(p.mutex);
    report = p.report;
    search = p.search;
    p.live[begin] = live;
    if (p.frees != segment_frees(made)) {
      p.filled.clear();
      p.frees = segment_frees(made);
    }
    pieces = take_filled(p, begin, begin + block.size);
  }
  if (report == nullptr || is_captured(stream)) {
    return;
  }
  const WithoutGil released;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  for (Piece &piece : pieces) {
    piece.history.address = first_written(search, piece.begin, piece.end, stream);
    if (piece.history.address < piece.end) {
      piece.history.handed_out = live.allocated;
      report(piece.history);
    }
  }
}

void detail::before_free(void *ptr)
{
  esper_core *made = core_if_made();
  esper_block_info block;
  if (made == nullptr || capi().find_block(made, ptr, &block) != ESPER_OK || block.live == 0) {
    return;
  }
  const uint32_t freed = sites::now();
  const auto begin = reinterpret_cast<uintptr_t>(block.address);
  Poison &p = state();
  std::lock_guard<std::mutex> lock(p.mutex);
  const auto found = p.live.find(begin);
  if (found == p.live.end()) {
    return; // from before
  }
  Live live = found->second;
  p.live.erase(found);
  // A mark of its own stream says nothing new, and the fill is in that stream's order anyway.
  auto *own = std::remove_if(live.marks.begin(), live.marks.end(), [&](const CUDAStream &mark) {
    return mark.stream() == static_cast<cudaStream_t>(block.stream) &&
           mark.device_index() == block.device;
  });
  live.marks.erase(own, live.marks.end());
  if (!may_fill(block, live)) {
    return;
  }
  fill(p, made, block, live);
  LateWrite history{};
  history.block = begin;
  history.size = block.size;
  history.device = block.device;
  history.home = static_cast<cudaStream_t>(block.stream);
  history.allocated = live.allocated;
  history.freed = freed;
  p.filled[begin] = Filled{begin + block.size, history};
}

} // namespace poison

} // namespace esper
