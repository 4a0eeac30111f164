#include "out_of_memory.h"

#include <c10/core/Allocator.h>

#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "../base/allocator.h"
#include "../base/core_api.h"
#include "processes.h"

namespace esper
{
namespace
{

using c10::CachingAllocator::format_size;
using native::OutOfMemoryObserver;

constexpr size_t kNoLimit = SIZE_MAX;

std::mutex observers_mutex;

std::vector<OutOfMemoryObserver> &observers()
{
  static auto *list = new std::vector<OutOfMemoryObserver>();
  return *list;
}

std::vector<OutOfMemoryObserver> &rejection_observers()
{
  static auto *list = new std::vector<OutOfMemoryObserver>();
  return *list;
}

// A copy, so that observers are called without the lock: they may take the GIL, and attaching one
// happens with the GIL held.
std::vector<OutOfMemoryObserver> copy_of(const std::vector<OutOfMemoryObserver> &list)
{
  std::lock_guard<std::mutex> lock(observers_mutex);
  return list;
}

void tell(const esper_failure &failure)
{
  // As PyTorch's own allocator does, observers get the size of the segment that would have been
  // requested from the driver.
  const size_t segment = failure.segment != 0 ? failure.segment : failure.size;
  const size_t total = failure.limit != kNoLimit ? failure.limit : failure.device_total;
  for (const auto &observer : copy_of(observers())) {
    observer(failure.device, segment, total, failure.device_free);
  }
  c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(failure.size), failure.allocated,
                                   failure.reserved,
                                   c10::Device(c10::kCUDA,
                                               static_cast<c10::DeviceIndex>(failure.device)));
}

// With the sentences of PyTorch's own allocator. A process in a container does not know its process
// id as the driver sees it, so it is listed like the others.
void describe_processes(std::ostringstream &text, int device)
{
  for (const auto &process : processes_on(device)) {
    if (process.pid == getpid()) {
      text << "Including non-PyTorch memory, this process";
    } else {
      text << "Process " << process.pid;
    }
    text << " has " << format_size(process.bytes) << " memory in use. ";
  }
}

// Programs match the beginning, up to "reserved by PyTorch but unallocated". The rest is advice.
std::string describe(const esper_failure &failure)
{
  std::ostringstream text;
  text << "CUDA out of memory. Tried to allocate " << format_size(failure.requested) << ". GPU "
       << failure.device << " has a total capacity of " << format_size(failure.device_total)
       << " of which " << format_size(failure.device_free) << " is free. ";
  describe_processes(text, failure.device);
  if (failure.limit != kNoLimit) {
    text << format_size(failure.limit) << " allowed; ";
  }
  const size_t idle =
      failure.reserved > failure.allocated ? failure.reserved - failure.allocated : 0;
  text << "Of the allocated memory " << format_size(failure.allocated)
       << " is allocated by PyTorch, ";
  if (failure.private_pools != 0) {
    text << "with " << format_size(failure.private_pools)
         << " allocated in private pools (e.g., CUDA Graphs), ";
  }
  text << "and " << format_size(idle) << " is reserved by PyTorch but unallocated."
       << " Before it gave up, esper_alloc waited for what it may wait for and gave"
       << " back what it may give back; torch.cuda.memory_summary() shows what is live.";
  if (failure.addresses_missing != 0) {
    text << " What is missing are addresses: live memory leaves none for a fence of "
         << format_size(failure.addresses_missing) << ". Free some, or audit without the fence.";
  }
  if (const char *file = capi().alloc_note_oom()) {
    text << " What stood in its way, and what would have let it through: `python -m esper_alloc"
         << " explain " << file << "`. What was allocated, and where: `python -m esper_alloc view "
         << file << "`.";
  }
  return std::move(text).str();
}

} // namespace

void Allocator::attachOutOfMemoryObserver(native::OutOfMemoryObserver observer)
{
  std::lock_guard<std::mutex> lock(observers_mutex);
  observers().emplace_back(std::move(observer));
}

void Allocator::attachOomRejectionObserver(native::OutOfMemoryObserver observer)
{
  std::lock_guard<std::mutex> lock(observers_mutex);
  rejection_observers().emplace_back(std::move(observer));
}

void throw_out_of_memory()
{
  esper_failure failure;
  capi().get_failure(&failure);
  tell(failure);
  TORCH_CHECK_WITH(OutOfMemoryError, false, describe(failure));
}

void throw_rejection()
{
  esper_failure failure;
  capi().get_failure(&failure);
  for (const auto &observer : copy_of(rejection_observers())) {
    observer(failure.device, failure.segment, failure.reserved, failure.device_total);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false,
                   "CUDA out of memory. Allocation was preemptively rejected because it would"
                   " exceed per_process_memory_fraction limit. Requested size: ",
                   format_size(failure.segment));
}

void check_size(size_t size)
{
  constexpr size_t exabyte = size_t{1} << 60;
  TORCH_CHECK_WITH(OutOfMemoryError, size < exabyte,
                   "CUDA out of memory. Tried to allocate more than 1EB memory.");
}

} // namespace esper
