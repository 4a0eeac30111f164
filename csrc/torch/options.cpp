#include "options.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>

#include <algorithm>
#include <cstdint>
#include <functional>

#include "core_api.h"
#include "out_of_memory.h"

namespace esper {
namespace {

using CommonConfig = c10::CachingAllocator::AcceleratorAllocatorConfig;
using CudaConfig = c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig;

// Newer than the oldest PyTorch supported: asked for only where it exists.
template <class Config>
auto rejects_growth(int) -> decltype(Config::throw_on_cudamalloc_oom()) {
  return Config::throw_on_cudamalloc_oom();
}
template <class Config>
bool rejects_growth(long) {
  return false;
}

// Whether PyTorch calls markCaptureBegin().
template <class Base>
auto announces_captures(int)
    -> decltype(&Base::markCaptureBegin, true) {
  return true;
}
template <class Base>
bool announces_captures(long) {
  return false;
}

// The core is C, and a free may be calling: where warnings are errors, they
// stop here.
void warn(void* /*context*/, const char* text) {
  try {
    TORCH_WARN("esper_alloc: ", text);
  } catch (const std::exception&) {
  }
}

constexpr size_t kLargeSegmentByDefault = 20971520;

// The kind that the core was made with: what stands when expandable_segments is
// taken back at run time.
esper_segments segments_by_default(esper_segments now) {
  static const esper_segments first = now;
  return first;
}

} // namespace

void parse_environment() {
  CommonConfig::instance();
  CudaConfig::instance();
}

void apply_options(esper_core* core) {
  esper_config config;
  capi().get_config(core, &config);
  const size_t max_split = CommonConfig::max_split_size();
  config.max_split_size = max_split == SIZE_MAX ? 0 : max_split;
  config.max_non_split_rounding = CommonConfig::max_non_split_rounding_size();
  // What PyTorch has where the user said nothing is the core's own choice here.
  const size_t large_segment = CommonConfig::large_segment_size();
  config.large_segment_size =
      large_segment == kLargeSegmentByDefault ? 0 : large_segment;
  const esper_segments by_default = segments_by_default(config.segments);
  config.segments = CommonConfig::use_expandable_segments()
      ? ESPER_SEGMENTS_MAPPED
      : by_default;
  const auto& divisions = CommonConfig::roundup_power2_divisions();
  std::fill_n(config.roundup_power2_divisions, ESPER_ROUNDUP_STEPS, size_t{0});
  std::copy_n(
      divisions.begin(),
      std::min<size_t>(divisions.size(), ESPER_ROUNDUP_STEPS),
      config.roundup_power2_divisions);
  config.garbage_collection_threshold =
      CommonConfig::garbage_collection_threshold();
  // By the option's own fraction, which need not be the one in force.
  const double fraction = CudaConfig::per_process_memory_fraction();
  config.rejection_share =
      rejects_growth<CudaConfig>(0) && fraction < 1.0 ? fraction : 0.0;
  config.free_memory = free_registered_memory;
  config.free_memory_context = nullptr;
  config.warn = warn;
  config.warn_context = nullptr;
  config.captures_are_announced =
      announces_captures<c10::cuda::CUDACachingAllocator::CUDAAllocator>(0);
  check(capi().configure(core, &config), "applying allocator options");
}

void apply_memory_fraction(esper_core* core) {
  const double fraction = CudaConfig::per_process_memory_fraction();
  if (fraction >= 1.0) {
    return;
  }
  for (int device = 0; device < capi().device_count(core); ++device) {
    check(
        capi().set_memory_fraction(core, device, fraction),
        "applying per_process_memory_fraction");
  }
}

void follow_settings() {
  // PyTorch calls this hook after each parse. Ours runs what stood there,
  // which parses CUDA's own options, and then hands the result on.
  auto& hook = CommonConfig::getConfigParserHook();
  hook = [before = std::move(hook)](const std::string& settings) {
    if (before) {
      before(settings);
    }
    if (esper_core* made = core_if_made()) {
      apply_options(made);
    }
  };
}

} // namespace esper
