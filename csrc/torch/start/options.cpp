#include "options.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <string>

#include "../../python/gil.h"
#include "../base/core_api.h"
#include "../base/current.h"
#include "../ipc/sharing.h"

namespace esper
{
namespace
{

using CommonConfig = c10::CachingAllocator::AcceleratorAllocatorConfig;
using CudaConfig = c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig;

// Newer than the oldest supported PyTorch, so read only where it exists.
template <class Config>
auto rejects_growth(int) -> decltype(Config::throw_on_cudamalloc_oom())
{
  return Config::throw_on_cudamalloc_oom();
}
template <class Config>
bool rejects_growth(long)
{
  return false;
}

// Whether PyTorch calls markCaptureBegin().
template <class Base>
auto announces_captures(int) -> decltype(&Base::markCaptureBegin, true)
{
  return true;
}
template <class Base>
bool announces_captures(long)
{
  return false;
}

// The core is C, and the caller may be a free: if warnings are errors, the exception stops here.
void warn(void * /*context*/, const char *text)
{
  try {
    TORCH_WARN("esper_alloc: ", text);
  } catch (const std::exception &) {
  }
}

// Runs every callback in PyTorch's FreeCudaMemoryCallbacksRegistry, and if memory is short ends
// sharing that nobody uses. Nonzero: something was freed. The core calls it with no lock held.
int free_registered_memory(void * /*context*/, int short_of_memory)
{
  bool freed = false;
  auto *registry = c10::FreeCudaMemoryCallbacksRegistry();
  for (const auto &name : registry->Keys()) {
    // An exception must not pass through the core, which is C. A callback that fails has freed
    // nothing, and the caller learns of the shortage anyway.
    try {
      freed |= registry->Create(name)->Execute();
    } catch (const std::exception &error) {
      warn(nullptr, ("the free-memory callback " + name + " failed: " + error.what()).c_str());
    } catch (...) {
      warn(nullptr, ("the free-memory callback " + name + " failed").c_str());
    }
  }
  // What a callback freed may have been shared, so this comes afterwards.
  const bool unshared = short_of_memory != 0 && forget_unshared();
  return freed || unshared ? 1 : 0;
}

// Whether the user ever set these. PyTorch's parsed values do not distinguish
// expandable_segments:False, which asks for classic segments, from no setting, which leaves the
// choice to the core. Nor do they distinguish the default segment size from none.
std::atomic<bool> expandable_was_given{false};
std::atomic<bool> large_segment_was_given{false};

void look_for_given(const std::string &settings)
{
  const c10::CachingAllocator::ConfigTokenizer words(settings);
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "expandable_segments") {
      expandable_was_given = true;
    } else if (words[i] == "large_segment_size_mb") {
      large_segment_was_given = true;
    }
  }
}

// PyTorch compares `backend:` with the name of the current allocator, which is not "native",
// although everything that native supports works here. Without that entry it accepts the rest.
std::string without_native_backend(const std::string &settings)
{
  const c10::CachingAllocator::ConfigTokenizer words(settings);
  std::string rest;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i + 2 < words.size() && words[i] == "backend" && words[i + 1] == ":" &&
        words[i + 2] == "native") {
      i += 3; // and the comma
    } else {
      rest += words[i];
    }
  }
  return rest;
}

esper_segments segments_asked_for(esper_segments otherwise)
{
  if (!expandable_was_given) {
    return otherwise;
  }
  return CommonConfig::use_expandable_segments() ? ESPER_SEGMENTS_MAPPED : ESPER_SEGMENTS_CLASSIC;
}

} // namespace

static void parse_environment()
{
  // The last settings may no longer be those from the environment.
  for (const char *name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    if (const char *given = std::getenv(name)) {
      look_for_given(given);
    }
  }
  look_for_given(CommonConfig::last_allocator_settings());
  CudaConfig::instance();
}

void apply_options(esper_core *core)
{
  // Otherwise, of two threads, the one that read first might write last.
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  esper_config config;
  capi().get_config(core, &config);
  // PyTorch's largest value in whole MiB means no limit, too.
  constexpr size_t kUnlimited = SIZE_MAX / (1024 * 1024) * (1024 * 1024);
  const size_t max_split = CommonConfig::max_split_size();
  config.max_split_size = max_split >= kUnlimited ? 0 : max_split;
  config.max_non_split_rounding = CommonConfig::max_non_split_rounding_size();
  // PyTorch's default does not apply: without a setting the core chooses.
  config.large_segment_size = large_segment_was_given ? CommonConfig::large_segment_size() : 0;
  config.segments = segments_asked_for(config.segments);
  const auto &divisions = CommonConfig::roundup_power2_divisions();
  std::fill_n(config.roundup_power2_divisions, ESPER_ROUNDUP_STEPS, size_t{0});
  std::copy_n(divisions.begin(), std::min<size_t>(divisions.size(), ESPER_ROUNDUP_STEPS),
              config.roundup_power2_divisions);
  // The fraction of the option, which may differ from the one in force.
  const double fraction = CudaConfig::per_process_memory_fraction();
  // For a fraction of 0 the smallest positive number, because to the core 0 means that nothing is
  // rejected.
  config.rejection_share = rejects_growth<CudaConfig>(0) && fraction < 1.0
                               ? std::max(fraction, std::numeric_limits<double>::min())
                               : 0.0;
  config.free_memory = free_registered_memory;
  config.free_memory_context = nullptr;
  config.while_waiting = esper_py_while_waiting;
  config.warn = warn;
  config.warn_context = nullptr;
  config.captures_are_announced =
      announces_captures<c10::cuda::CUDACachingAllocator::CUDAAllocator>(0);
  check(capi().configure(core, &config), "applying allocator options");
}

void apply_memory_fraction(esper_core *core)
{
  const double fraction = CudaConfig::per_process_memory_fraction();
  if (fraction >= 1.0) {
    return;
  }
  for (int device = 0; device < capi().device_count(core); ++device) {
    check(capi().set_memory_fraction(core, device, fraction),
          "applying per_process_memory_fraction");
  }
}

static void follow_settings()
{
  // PyTorch calls this hook after each parse. The new one first runs the old one, which parses
  // CUDA's own options, and then passes the result on.
  auto &hook = CommonConfig::getConfigParserHook();
  hook = [before = std::move(hook)](const std::string &settings) {
    std::exception_ptr refused; // what PyTorch has read before that holds
    try {
      if (before) {
        before(is_current() ? without_native_backend(settings) : settings);
      }
    } catch (...) {
      refused = std::current_exception();
    }
    look_for_given(settings);
    if (esper_core *made = core_if_made()) {
      apply_options(made);
    }
    if (refused) {
      std::rethrow_exception(refused);
    }
  };
}

void begin_options()
{
  static std::once_flag begun;
  std::call_once(begun, [] {
    parse_environment();
    follow_settings();
  });
}

} // namespace esper
