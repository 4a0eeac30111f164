// Private pools: the memory of graphs and MemPools. A pool is opened and closed
// for allocations (begin, end); its filter says which of them it serves.
#include "pools.h"

#include <pybind11/pybind11.h>

#include <exception>
#include <optional>
#include <utility>

#include "allocator.h"
#include "core_api.h"
#include "unsupported.h"

namespace esper {
namespace {

using Filter = std::function<bool(cudaStream_t)>;

thread_local std::exception_ptr filter_failure;

// The core is C: what a filter throws is kept until the malloc has failed.
int ask(void* filter, void* stream) {
  try {
    return (*static_cast<Filter*>(filter))(static_cast<cudaStream_t>(stream))
        ? 1
        : 0;
  } catch (...) {
    filter_failure = std::current_exception();
    return -1;
  }
}

// use_mem_pool() comes with the GIL, a capture without. What a pool that is begun
// waits for may need another thread of Python to go on.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      released_.emplace();
    }
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

} // namespace

void rethrow_filter_failure() {
  if (filter_failure) {
    std::rethrow_exception(std::exchange(filter_failure, nullptr));
  }
}

void Allocator::beginAllocateToPool(
    c10::DeviceIndex device,
    c10::MempoolId_t pool,
    std::function<bool(cudaStream_t)> filter) {
  auto kept = std::make_unique<Filter>(std::move(filter));
  const WithoutGil no_gil;
  check(
      capi().pool_begin(
          core(), device, pool.first, pool.second, &ask, kept.get()),
      "beginning allocations to a pool");
  kept.release(); // the core's until the end
}

void Allocator::endAllocateToPool(
    c10::DeviceIndex device,
    c10::MempoolId_t pool) {
  void* filter = nullptr;
  const WithoutGil no_gil; // threads may be asking the filter
  check(
      capi().pool_end(core(), device, pool.first, pool.second, &filter),
      "ending allocations to a pool");
  delete static_cast<Filter*>(filter);
}

void Allocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  check(
      capi().pool_release(core(), device, pool.first, pool.second),
      "releasing a pool");
}

int Allocator::getPoolUseCount(
    c10::DeviceIndex device,
    c10::MempoolId_t pool) {
  return capi().pool_use_count(core(), device, pool.first, pool.second);
}

void Allocator::createOrIncrefPool(
    c10::DeviceIndex device,
    c10::MempoolId_t pool,
    std::shared_ptr<native::CUDAAllocator> segments) {
  if (segments) {
    throw_unsupported(
        "createOrIncrefPool with an allocator",
        "torch.cuda.MemPool(allocator=...)");
  }
  esper_pool* made = nullptr;
  check(
      capi().pool_create(core(), device, pool.first, pool.second, &made),
      "making a pool");
}

void Allocator::setUseOnOOM(
    c10::DeviceIndex /*device*/,
    c10::MempoolId_t /*pool*/,
    bool use_on_oom) {
  // Every MemPool says that it is not so when it goes.
  if (use_on_oom) {
    throw_unsupported("setUseOnOOM", "torch.cuda.MemPool(use_on_oom=True)");
  }
}

void Allocator::setNoSplit(
    c10::DeviceIndex /*device*/,
    c10::MempoolId_t /*pool*/) {
  throw_unsupported("setNoSplit", "torch.cuda.MemPool(no_split=True)");
}

} // namespace esper
