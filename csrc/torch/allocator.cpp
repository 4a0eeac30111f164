#include "allocator.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/env.h>

#include <algorithm>

#include "core_api.h"
#include "history.h"
#include "options.h"
#include "out_of_memory.h"
#include "pools.h"
#include "sharing.h"
#include "stream.h"
#include "uncached.h"

namespace esper
{
namespace
{

// Tells the profiler of an allocation or free, with the device's totals. Only while it records
// memory, because reading the totals is slow.
void report_to_profiler(const void *ptr, bool allocated)
{
  esper_block_info block;
  esper_stats stats;
  esper_core *made = core();
  if (capi().find_block(made, ptr, &block) != ESPER_OK ||
      capi().get_stats(made, block.device, &stats) != ESPER_OK) {
    return;
  }
  const auto size = static_cast<int64_t>(block.size);
  int64_t live = stats.allocated_bytes[ESPER_ALL].current;
  if (!allocated) {
    live -= size; // read before the free, reported as after it
  }
  c10::reportMemoryUsageToProfiler(const_cast<void *>(ptr), allocated ? size : -size,
                                   static_cast<size_t>(live),
                                   static_cast<size_t>(stats.reserved_bytes[ESPER_ALL].current),
                                   c10::Device(c10::kCUDA,
                                               static_cast<c10::DeviceIndex>(block.device)));
}

inline void tell_of_allocation(void *ptr)
{
  const c10::impl::PyInterpreter *tracer = c10::impl::GPUTrace::get_trace();
  if (C10_UNLIKELY(tracer != nullptr)) {
    (*tracer)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
  }
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    report_to_profiler(ptr, true);
  }
}

inline void tell_of_free(void *ptr)
{
  const c10::impl::PyInterpreter *tracer = c10::impl::GPUTrace::get_trace();
  if (C10_UNLIKELY(tracer != nullptr)) {
    (*tracer)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
  }
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    report_to_profiler(ptr, false);
  }
}

[[noreturn]] C10_NOINLINE void throw_malloc_failure(esper_status status)
{
  if (status == ESPER_OUT_OF_MEMORY) {
    throw_out_of_memory();
  }
  if (status == ESPER_REJECTED) {
    throw_rejection();
  }
  if (status == ESPER_INVALID) { // the status of a failed callback
    rethrow_callback_failure();
  }
  throw_status(status, "allocating memory");
}

// Asking the runtime costs as much as the rest of an allocation. With one device there is no need
// to.
inline c10::DeviceIndex current_device()
{
  static const bool only_one = c10::cuda::device_count() == 1;
  return only_one ? 0 : c10::cuda::current_device();
}

inline void *allocate_on(esper_stream stream, size_t size)
{
  const CallContext call(RecordContext::STATE);
  void *ptr = nullptr;
  const esper_status status = capi().malloc(core(), size, stream, &ptr);
  if (C10_UNLIKELY(status != ESPER_OK)) {
    throw_malloc_failure(status);
  }
  tell_of_allocation(ptr);
  return ptr;
}

} // namespace

void delete_memory(void *ptr)
{
  esper_core *made = core_if_made();
  if (ptr == nullptr || made == nullptr) {
    return; // null, or the parent's tensor in a forked child
  }
  try {
    tell_of_free(ptr);
  } catch (const std::exception &) {
    // A tracer raised. The memory is freed all the same.
  }
  try {
    const CallContext call(RecordContext::ALL);
    // Any other failure (a sticky error, a driver that is shutting down) is left for the next
    // allocation to report.
    if (C10_UNLIKELY(capi().free(made, ptr) == ESPER_INVALID)) {
      TORCH_WARN("esper_alloc: invalid free: ", capi().last_error());
    }
  } catch (const std::exception &) {
    // The warning raised, but a destructor must not throw.
  }
}

Allocator &allocator()
{
  static auto *instance = new Allocator();
  return *instance;
}

Allocator::Allocator() : uncached_(c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true)
{
  parse_environment();
  follow_settings();
}

c10::DataPtr Allocator::allocate(size_t size)
{
  check_size(size);
  const c10::DeviceIndex device = current_device();
  const c10::Device where(c10::kCUDA, device);
  if (C10_UNLIKELY(!isEnabled())) {
    void *ptr = allocate_uncached(size);
    return {ptr, ptr, &delete_uncached, where};
  }
  void *ptr =
      size == 0 ? nullptr : allocate_on(to_esper(c10::cuda::getCurrentCUDAStream(device)), size);
  return {ptr, ptr, &delete_memory, where};
}

c10::DeleterFnPtr Allocator::raw_deleter() const
{
  return isEnabled() ? &delete_memory : &delete_uncached;
}

void *Allocator::raw_alloc(size_t size)
{
  if (size == 0) {
    return nullptr;
  }
  check_size(size);
  if (C10_UNLIKELY(!isEnabled())) {
    return allocate_uncached(size);
  }
  const c10::DeviceIndex device = current_device();
  return allocate_on(to_esper(c10::cuda::getCurrentCUDAStream(device)), size);
}

void *Allocator::raw_alloc_with_stream(size_t size, cudaStream_t stream)
{
  if (size == 0) {
    return nullptr;
  }
  check_size(size);
  if (C10_UNLIKELY(!isEnabled())) {
    return allocate_uncached(size);
  }
  return allocate_on(to_esper(stream, current_device()), size);
}

void Allocator::raw_delete(void *ptr)
{
  if (ptr == nullptr) {
    return;
  }
  esper_core *made = core_unless_forked();
  // Caching may have been turned off or on since the allocation.
  esper_block_info block;
  if (C10_UNLIKELY(!isEnabled()) &&
      (made == nullptr || capi().find_block(made, ptr, &block) != ESPER_OK)) {
    delete_uncached(ptr);
    return;
  }
  if (C10_UNLIKELY(made == nullptr)) {
    return; // the memory is the parent's, in a forked child
  }
  tell_of_free(ptr);
  const CallContext call(RecordContext::ALL);
  const esper_status status = capi().free(made, ptr);
  TORCH_CHECK(status != ESPER_INVALID, "invalid device pointer: ", ptr, " (", capi().last_error(),
              ")");
}

void Allocator::copy_data(void *to, const void *from, std::size_t count) const
{
  C10_CUDA_CHECK(cudaMemcpy(to, from, count, cudaMemcpyDeviceToDevice));
}

void Allocator::recordStream(const c10::DataPtr &data, c10::cuda::CUDAStream stream)
{
  // Others must protect their own memory: an uncached tensor, one from DLPack or IPC.
  if (data.get() == nullptr || data.get_deleter() != &delete_memory) {
    return;
  }
  check(capi().record_stream(core(), data.get(), to_esper(stream)), "record_stream");
}

void *Allocator::getBaseAllocation(void *ptr, size_t *size)
{
  void *base = nullptr;
  size_t bytes = 0;
  TORCH_CHECK(capi().find_base(core(), ptr, &base, &bytes) == ESPER_OK,
              "invalid device pointer: ", ptr, " is in no live block of esper_alloc");
  if (size != nullptr) {
    *size = bytes;
  }
  return base;
}

void Allocator::init(int /*device_count*/)
{
  apply_memory_fraction(core());
  if (initialized_.exchange(true)) {
    return;
  }
  // torch.accelerator.* and c10::GetAllocator() have a registry of their own, which changing the
  // CUDA allocator does not touch. PyTorch's own allocator is registered there with priority 0.
  c10::SetAllocator(c10::kCUDA, this, /*priority=*/1);
}

bool Allocator::initialized()
{
  return initialized_.load(std::memory_order_acquire);
}

std::string Allocator::name()
{
  return "esper_alloc";
}

void Allocator::enable(bool value)
{
  caching_.store(value, std::memory_order_relaxed);
}

bool Allocator::isEnabled() const
{
  return caching_.load(std::memory_order_relaxed) && !uncached_;
}

void Allocator::emptyCache(c10::MempoolId_t pool)
{
  const bool every_pool = pool == c10::MempoolId_t(0, 0);
  esper_core *made = core_unless_forked();
  if (made == nullptr) {
    return; // the core is the parent's
  }
  forget_unshared();
  const CallContext call(RecordContext::ALL);
  const WithoutGil no_gil; // it waits for the device
  for (int device = 0; device < capi().device_count(made); ++device) {
    const esper_status status = every_pool
                                    ? capi().empty_cache(made, device, nullptr)
                                    : capi().pool_empty(made, device, pool.first, pool.second);
    // For a pool the caller may be a MemPool's destructor, which must not throw. The next
    // allocation will report what is wrong with the device.
    const bool device_failed = status == ESPER_DEVICE_ERROR || status == ESPER_SHUT_DOWN;
    if (every_pool || !device_failed) {
      check(status, "emptying the cache");
    }
  }
}

void Allocator::cacheInfo(c10::DeviceIndex device, size_t *largest)
{
  size_t available = 0;
  check(capi().largest_available(core(), device, &available), "finding the largest block");
  *largest = std::max(*largest, available);
}

double Allocator::getMemoryFraction(c10::DeviceIndex device)
{
  return capi().get_memory_fraction(core(), device);
}

void Allocator::setMemoryFraction(double fraction, c10::DeviceIndex device)
{
  check(capi().set_memory_fraction(core(), device, fraction), "setting the memory fraction");
}

void Allocator::attachOutOfMemoryObserver(native::OutOfMemoryObserver observer)
{
  add_out_of_memory_observer(std::move(observer));
}

void Allocator::attachOomRejectionObserver(native::OutOfMemoryObserver observer)
{
  add_rejection_observer(std::move(observer));
}

void Allocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer)
{
  c10::cuda::CUDAGuard guard(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
  } else {
    C10_CUDA_CHECK(status);
  }
  // This was for memory from cudaMalloc. Pages need the core; `device` is the one that accesses.
  check(capi().add_peer(core(), peer, device), "giving a peer access");
}

cudaError_t Allocator::memcpyAsync(void *to, int to_device, const void *from, int from_device,
                                   size_t count, cudaStream_t stream, bool peer_access)
{
  if (peer_access || to_device == from_device) {
    return cudaMemcpyAsync(to, from, count, cudaMemcpyDeviceToDevice, stream);
  }
  // The only call that works without peer access, wherever memory comes from.
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, count, stream);
}

} // namespace esper
