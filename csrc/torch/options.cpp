#include "options.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <mutex>
#include <string>

#include "allocator.h"
#include "core_api.h"
#include "out_of_memory.h"

namespace esper
{
namespace
{

using CommonConfig = c10::CachingAllocator::AcceleratorAllocatorConfig;
using CudaConfig = c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig;

// Newer than the oldest PyTorch supported: asked for only where it exists.
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

// The core is C, and a free may be calling: where warnings are errors, they
// stop here.
void warn(void * /*context*/, const char *text)
{
  try {
    TORCH_WARN("esper_alloc: ", text);
  } catch (const std::exception &) {
  }
}

// Whether these were ever given. PyTorch's parsed values alone do not tell
// expandable_segments:False, which asks for classic segments, from silence, which leaves
// the kind to the core; nor a size of segments that is the default from none.
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

// PyTorch holds `backend:` against the name of the current allocator, which is not
// "native" here, though all that native does is done: without it the rest is accepted.
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

void parse_environment()
{
  // The last settings may be others by now, given before this allocator was there.
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
  // Or of two threads the one that read first could be the one that writes last.
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  esper_config config;
  capi().get_config(core, &config);
  // So many whole MiB as there are addresses are no limit either.
  constexpr size_t kUnlimited = SIZE_MAX / (1024 * 1024) * (1024 * 1024);
  const size_t max_split = CommonConfig::max_split_size();
  config.max_split_size = max_split >= kUnlimited ? 0 : max_split;
  config.max_non_split_rounding = CommonConfig::max_non_split_rounding_size();
  // What PyTorch has where the user said nothing is the core's own choice here.
  config.large_segment_size = large_segment_was_given ? CommonConfig::large_segment_size() : 0;
  config.segments = segments_asked_for(config.segments);
  const auto &divisions = CommonConfig::roundup_power2_divisions();
  std::fill_n(config.roundup_power2_divisions, ESPER_ROUNDUP_STEPS, size_t{0});
  std::copy_n(divisions.begin(), std::min<size_t>(divisions.size(), ESPER_ROUNDUP_STEPS),
              config.roundup_power2_divisions);
  config.garbage_collection_threshold = CommonConfig::garbage_collection_threshold();
  // By the option's own fraction, which need not be the one in force.
  const double fraction = CudaConfig::per_process_memory_fraction();
  // Of a fraction of 0 the least there is: to the core 0 means that nothing is rejected.
  config.rejection_share = rejects_growth<CudaConfig>(0) && fraction < 1.0
                               ? std::max(fraction, std::numeric_limits<double>::min())
                               : 0.0;
  config.free_memory = free_registered_memory;
  config.free_memory_context = nullptr;
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

void follow_settings()
{
  // PyTorch calls this hook after each parse. Ours runs what stood there,
  // which parses CUDA's own options, and then hands the result on.
  auto &hook = CommonConfig::getConfigParserHook();
  hook = [before = std::move(hook)](const std::string &settings) {
    if (before) {
      const bool is_ours = native::get() == &allocator();
      before(is_ours ? without_native_backend(settings) : settings);
    }
    look_for_given(settings);
    if (esper_core *made = core_if_made()) {
      apply_options(made);
    }
  };
}

} // namespace esper
