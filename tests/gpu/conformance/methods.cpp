// What C++ programs alone reach of the allocator, for methods.py.
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace native = c10::cuda::CUDACachingAllocator;

namespace
{

constexpr int kMost = 1000;

std::mutex mutex;
std::vector<std::vector<long long>> told, rejected;

// Moves rows of four numbers to `out`, which has room for kMost; says how many.
int take(std::vector<std::vector<long long>> &from, long long *out)
{
  std::lock_guard<std::mutex> lock(mutex);
  const int count = std::min<int>(kMost, static_cast<int>(from.size()));
  for (int i = 0; i < count; ++i) {
    std::copy_n(from[i].begin(), 4, out + 4 * i);
  }
  from.clear();
  return count;
}

// Newer than the oldest PyTorch supported.
template <class Allocator, class Observer>
auto attach(Allocator *to, Observer observer, int)
    -> decltype(to->attachOomRejectionObserver(observer), true)
{
  to->attachOomRejectionObserver(std::move(observer));
  return true;
}
template <class Allocator, class Observer>
bool attach(Allocator *, Observer, long)
{
  return false;
}

} // namespace

extern "C" {

void track()
{
  native::attachAllocatorTraceTracker([](const native::TraceEntry &entry) {
    std::lock_guard<std::mutex> lock(mutex);
    told.push_back({static_cast<long long>(entry.action_), static_cast<long long>(entry.size_),
                    static_cast<long long>(entry.mempool_.first),
                    static_cast<long long>(entry.mempool_.second)});
  });
}

int take_told(long long *out)
{
  return take(told, out);
}

// Whether this PyTorch has such observers.
int watch_rejections()
{
  return attach(native::get(),
                native::OutOfMemoryObserver([](int64_t device, size_t size, size_t total,
                                               size_t free) {
                  std::lock_guard<std::mutex> lock(mutex);
                  rejected.push_back({device, static_cast<long long>(size),
                                      static_cast<long long>(total), static_cast<long long>(free)});
                }),
                0);
}

int take_rejected(long long *out)
{
  return take(rejected, out);
}

// Rows of: the stream's handle, whether it is for small memory, bytes, 0.
int expandable_sizes(int device, long long *out)
{
  std::vector<std::vector<long long>> rows;
  for (const auto &one : native::getExpandableSegmentSizes(static_cast<c10::DeviceIndex>(device))) {
    rows.push_back({static_cast<long long>(reinterpret_cast<intptr_t>(one.stream)),
                    one.is_small_pool, static_cast<long long>(one.total_size), 0});
  }
  return take(rows, out);
}

// Rows of: the address, bytes, the number by which NCCL orders its registration, 0.
int segments_of_pool(long long first, long long second, long long *out)
{
  std::vector<std::vector<long long>> rows;
  const auto snapshot = native::snapshot(
      {static_cast<c10::CaptureId_t>(first), static_cast<c10::CaptureId_t>(second)});
  for (const auto &one : snapshot.segments) {
    rows.push_back({static_cast<long long>(one.address), static_cast<long long>(one.total_size),
                    one.registration_counter, 0});
  }
  return take(rows, out);
}

} // extern "C"
