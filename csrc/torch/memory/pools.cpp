#include "pools.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <exception>
#include <string>
#include <utility>

#include "../base/allocator.h"
#include "../base/gil.h"
#include "../start/the_core.h"

namespace esper
{
namespace
{

using Filter = std::function<bool(cudaStream_t)>;

// A callback's exception is kept until the malloc has failed, because the core is C.
thread_local std::exception_ptr failure;

int ask(void *filter, void *stream)
{
  try {
    return (*static_cast<Filter *>(filter))(static_cast<cudaStream_t>(stream)) ? 1 : 0;
  } catch (...) {
    failure = std::current_exception();
    return -1;
  }
}

// Another allocator, which provides a MemPool's segments.
struct Segments {
  std::shared_ptr<native::CUDAAllocator> from;
};

// Makes the device current and the capture mode relaxed, because the allocator may make calls that
// are otherwise forbidden while any thread captures.
struct OnDevice {
  explicit OnDevice(int device) : guard(static_cast<c10::DeviceIndex>(device))
  {
  }
  c10::cuda::CUDAGuard guard;
  c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
};

esper_status obtain_segment(void *context, int device, size_t size, void **address)
{
  failure = nullptr; // from an earlier malloc that succeeded in the end
  try {
    const OnDevice on(device);
    *address = static_cast<Segments *>(context)->from->raw_alloc(size);
    return *address != nullptr ? ESPER_OK : ESPER_OUT_OF_MEMORY;
  } catch (const c10::OutOfMemoryError &) {
    return ESPER_OUT_OF_MEMORY;
  } catch (...) {
    failure = std::current_exception();
    return ESPER_INVALID;
  }
}

void give_segment_back(void *context, int device, void *address, size_t /*size*/)
{
  try {
    const OnDevice on(device);
    static_cast<Segments *>(context)->from->raw_delete(address);
  } catch (const std::exception &error) {
    TORCH_WARN("esper_alloc: a MemPool's allocator did not take a segment back: ", error.what());
  } catch (...) {
    TORCH_WARN("esper_alloc: a MemPool's allocator did not take a segment back");
  }
}

void drop_segments(void *context)
{
  delete static_cast<Segments *>(context);
}

} // namespace

void rethrow_callback_failure()
{
  if (failure) {
    std::rethrow_exception(std::exchange(failure, nullptr));
  }
}

void Allocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                    std::function<bool(cudaStream_t)> filter)
{
  auto kept = std::make_unique<Filter>(std::move(filter));
  const WithoutGil no_gil;
  check(capi().pool_begin(core(), device, pool.first, pool.second, &ask, kept.get()),
        "beginning allocations to a pool");
  kept.release(); // owned by the core until esper_pool_end
}

void Allocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool)
{
  esper_core *made = core_unless_forked();
  if (made == nullptr) {
    return; // the pool is the parent's, in a forked child
  }
  void *filter = nullptr;
  const WithoutGil no_gil; // threads may be calling the filter
  check(capi().pool_end(made, device, pool.first, pool.second, &filter),
        "ending allocations to a pool");
  delete static_cast<Filter *>(filter);
}

void Allocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t pool)
{
  if (esper_core *made = core_unless_forked()) {
    check(capi().pool_release(made, device, pool.first, pool.second), "releasing a pool");
  }
}

int Allocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool)
{
  esper_core *made = core_unless_forked();
  return made != nullptr ? capi().pool_use_count(made, device, pool.first, pool.second) : 0;
}

void Allocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom)
{
  if (esper_core *made = core_unless_forked()) {
    check(capi().pool_set_flags(made, device, pool.first, pool.second, ESPER_POOL_USE_ON_OOM,
                                use_on_oom ? ESPER_POOL_USE_ON_OOM : 0),
          "setting use_on_oom of a pool");
  }
}

void Allocator::createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                   std::shared_ptr<native::CUDAAllocator> segments)
{
  esper_pool *made = nullptr;
  check(capi().pool_create(core(), device, pool.first, pool.second, &made), "making a pool");
  if (segments == nullptr || segments.get() == this) {
    return;
  }
  auto kept = std::make_unique<Segments>(Segments{std::move(segments)});
  const esper_source source{&obtain_segment, &give_segment_back, &drop_segments, kept.get()};
  const esper_status status =
      capi().pool_set_source(core(), device, pool.first, pool.second, &source);
  if (status != ESPER_OK) {
    const std::string why = capi().last_error();
    capi().pool_release(core(), device, pool.first, pool.second);
    TORCH_CHECK(false, "esper_alloc, making a pool: ", why);
  }
  kept.release(); // owned by the core until the pool is gone
}

void Allocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool)
{
  check(capi().pool_set_flags(core(), device, pool.first, pool.second, ESPER_POOL_NO_SPLIT,
                              ESPER_POOL_NO_SPLIT),
        "setting no_split of a pool");
}

} // namespace esper
