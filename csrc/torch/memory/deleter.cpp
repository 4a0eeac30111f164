#include "deleter.h"

#include "../automatic/automatic.h"
#include "../base/core_api.h"
#include "../debugging/fence.h"
#include "../reporting/history.h"
#include "../reporting/profiler.h"

namespace esper
{
namespace
{

C10_NOINLINE void warn_of_invalid_free()
{
  TORCH_WARN("esper_alloc: invalid free: ", capi().last_error());
}

} // namespace

void delete_memory(void *ptr)
{
  esper_core *made = core_if_made();
  if (ptr == nullptr || made == nullptr) {
    return; // null, or the parent's tensor in a forked child
  }
  expect_free();
  try {
    tell_of_free(ptr);
  } catch (const std::exception &) {
    // A tracer raised. The memory is freed all the same.
  }
  if (is_watched()) {
    try {
      fence::before_free(ptr);
    } catch (const std::exception &) {
      // The next allocation reports what CUDA has.
    }
  }
  try {
    const CallContext call(RecordContext::ALL);
    // Any other failure (a sticky error, a driver that is shutting down) is left for the next
    // allocation to report.
    if (C10_UNLIKELY(capi().free(made, ptr) == ESPER_INVALID)) {
      warn_of_invalid_free();
    }
  } catch (const std::exception &) {
    // The warning raised, but a destructor must not throw.
  }
}

} // namespace esper
