#include "core_api.h"

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <mutex>

#include "options.h"

namespace esper
{

namespace detail
{

const esper_capi *table = nullptr;
std::atomic<esper_core *> the_core{nullptr};
std::atomic<bool> forked{false};

esper_core *make_core()
{
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  esper_core *core = the_core.load(std::memory_order_acquire);
  if (core != nullptr) {
    return core;
  }
  core = capi().instance();
  TORCH_CHECK(core != nullptr, "esper_alloc cannot serve this process: ", capi().last_error());
  apply_options(core);
  // CUDA does not survive a fork, and a thread that does not exist in the child may hold a lock of
  // the core. So the child never uses the core.
  pthread_atfork(nullptr, nullptr, [] {
    the_core.store(nullptr);
    forked.store(true);
  });
  the_core.store(core, std::memory_order_release);
  apply_options(core); // again, because changes until now did not reach the core
  return core;
}

} // namespace detail

void set_capi(const esper_capi *table)
{
  detail::table = table;
}

namespace
{

// What failed calls of PyTorch's own throw. Programs look for the text "CUDA error" when they
// decide whether to end the process.
[[noreturn]] void throw_device_error(const char *why, const char *doing)
{
  cudaError_t code = cudaPeekAtLastError();
  if (code == cudaSuccess) {
    code = cudaErrorUnknown; // the driver reported it, not the runtime
  }
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              static_cast<int32_t>(code),
                              c10::str("CUDA error: ", why, " (esper_alloc, ", doing, ")"));
}

} // namespace

void throw_status(esper_status status, const char *doing)
{
  const char *why = capi().last_error();
  switch (status) {
  case ESPER_DEVICE_ERROR:
  case ESPER_SHUT_DOWN: throw_device_error(why, doing);
  case ESPER_UNSUPPORTED: TORCH_CHECK_NOT_IMPLEMENTED(false, "esper_alloc, ", doing, ": ", why);
  default:
    TORCH_CHECK(false, "esper_alloc, ", doing, ": ", why, " (", capi().status_name(status), ")");
  }
}

} // namespace esper
