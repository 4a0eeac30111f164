#include "profiler.h"

#include "../start/the_core.h"

namespace esper
{

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

} // namespace esper
