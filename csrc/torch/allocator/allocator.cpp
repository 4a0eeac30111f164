#include "../base/allocator.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/env.h>

#include <algorithm>

#include "../automatic/automatic.h"
#include "../base/current.h"
#include "../base/gil.h"
#include "../base/stream.h"
#include "../debugging/fence.h"
#include "../ipc/sharing.h"
#include "../memory/deleter.h"
#include "../memory/pools.h"
#include "../reporting/history.h"
#include "../reporting/out_of_memory.h"
#include "../reporting/profiler.h"
#include "../start/options.h"
#include "../start/the_core.h"
#include "../uses/mark_watch.h"
#include "uncached.h"

namespace esper
{
namespace
{

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
  if (is_watched()) {
    fence::after_malloc(ptr);
  }
  return ptr;
}

inline void *allocate_on(c10::cuda::CUDAStream stream, size_t size)
{
  expect_allocation(stream);
  return allocate_on(to_esper(stream), size);
}

} // namespace

Allocator &allocator()
{
  static auto *instance = new Allocator();
  return *instance;
}

Allocator::Allocator() : uncached_(c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true)
{
  begin_options();
  set_our_allocator(this);
}

// ---- memory ------------------------------------------------------------------

c10::DataPtr Allocator::allocate(size_t size)
{
  check_size(size);
  const c10::DeviceIndex device = current_device();
  const c10::Device where(c10::kCUDA, device);
  if (C10_UNLIKELY(!isEnabled())) {
    void *ptr = allocate_uncached(size);
    return {ptr, ptr, &delete_uncached, where};
  }
  void *ptr = size == 0 ? nullptr : allocate_on(c10::cuda::getCurrentCUDAStream(device), size);
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
  return allocate_on(c10::cuda::getCurrentCUDAStream(device), size);
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
  const c10::DeviceIndex device = current_device();
  expect_allocation(stream, device);
  return allocate_on(to_esper(stream, device), size);
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
  expect_free();
  tell_of_free(ptr);
  if (is_watched()) {
    fence::before_free(ptr);
  }
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
  if (const MarkWatcher *watcher = mark_watcher()) {
    watcher->marked(data.get(), stream, true);
  }
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

// ---- starting, limits, copies ------------------------------------------------

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
  const CallContext call(RecordContext::ALL);
  const WithoutGil no_gil; // it waits for the device
  forget_unshared();
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

// ---- IPC ---------------------------------------------------------------------

native::ShareableHandle Allocator::shareIpcHandle(void *ptr)
{
  return share_memory(core(), ptr);
}

std::shared_ptr<void> Allocator::getIpcDevPtr(std::string handle)
{
  return open_memory(core(), handle);
}

// ---- virtual from PyTorch 2.12 on or later -----------------------------------

void Allocator::markCaptureBegin(c10::DeviceIndex device)
{
  check(capi().capture_begin(core(), device), "noting that a capture begins");
}

void Allocator::markCaptureEnd(c10::DeviceIndex device)
{
  if (esper_core *made = core_unless_forked()) {
    check(capi().capture_end(made, device), "noting that a capture has ended");
  }
}

c10::DataPtr Allocator::allocateWithAddress(size_t /*size*/, void * /*address*/)
{
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "esper_alloc does not support allocateWithAddress yet, which placed "
                              "allocations need; run this program on PyTorch's native allocator "
                              "for now.");
}

} // namespace esper
