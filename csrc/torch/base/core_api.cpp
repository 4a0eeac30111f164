#include "core_api.h"

#include <cuda_runtime_api.h>

namespace esper
{

namespace detail
{

const esper_capi *table = nullptr;
std::atomic<esper_core *> the_core{nullptr};

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
