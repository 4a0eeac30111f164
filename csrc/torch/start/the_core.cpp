#include "the_core.h"

#include <pthread.h>

#include <mutex>

#include "options.h"

namespace esper::detail
{

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
  begin_options();
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

} // namespace esper::detail
