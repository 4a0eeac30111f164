#include "../base/allocator.h"

#include <cstdlib>
#include <memory>

#include "../start/the_core.h"

namespace esper
{
namespace
{

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

Stat convert(const esper_stat &from)
{
  Stat to;
  to.current = from.current;
  to.peak = from.peak;
  to.allocated = from.allocated;
  to.freed = from.freed;
  return to;
}

StatArray convert(const esper_stat (&from)[ESPER_CLASSES])
{
  static_assert(std::tuple_size<StatArray>::value == ESPER_CLASSES, "all, small, large: in both");
  return {convert(from[0]), convert(from[1]), convert(from[2])};
}

// Newer than the oldest supported PyTorch.
template <class Figures>
auto set_rejections(Figures &to, int64_t count, int) -> decltype(to.num_oom_rejections, void())
{
  to.num_oom_rejections = count;
}
template <class Figures>
void set_rejections(Figures &, int64_t, long)
{
}

template <class Figures>
auto set_pools(Figures &to, c10::DeviceIndex device, int)
    -> decltype(to.reserved_bytes_by_private_pools, void())
{
  esper_pool_stats *pools = nullptr;
  size_t count = 0;
  check(capi().get_pool_stats(core(), device, &pools, &count), "reading statistics of pools");
  const std::unique_ptr<esper_pool_stats, decltype(&std::free)> owner(pools, &std::free);
  for (size_t i = 0; i < count; ++i) {
    const c10::MempoolId_t id{pools[i].id[0], pools[i].id[1]};
    to.reserved_bytes_by_private_pools[id] = convert(pools[i].reserved_bytes);
  }
}
template <class Figures>
void set_pools(Figures &, c10::DeviceIndex, long)
{
}

} // namespace

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device)
{
  esper_stats from;
  check(capi().get_stats(core(), device, &from), "reading statistics");
  c10::CachingDeviceAllocator::DeviceStats to;
  to.allocation = convert(from.allocation);
  to.segment = convert(from.segment);
  to.active = convert(from.active);
  to.inactive_split = convert(from.inactive_split);
  to.allocated_bytes = convert(from.allocated_bytes);
  to.reserved_bytes = convert(from.reserved_bytes);
  to.active_bytes = convert(from.active_bytes);
  to.inactive_split_bytes = convert(from.inactive_split_bytes);
  to.requested_bytes = convert(from.requested_bytes);
  to.oversize_allocations = convert(from.oversize_allocations);
  to.oversize_segments = convert(from.oversize_segments);
  to.num_alloc_retries = from.num_alloc_retries;
  to.num_ooms = from.num_ooms;
  set_rejections(to, from.num_oom_rejections, 0);
  set_pools(to, device, 0);
  to.num_sync_all_streams = from.num_sync_all_streams;
  to.num_device_alloc = from.num_device_alloc;
  to.num_device_free = from.num_device_free;
  to.max_split_size = from.max_split_size;
  return to;
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device)
{
  check(capi().reset_accumulated_stats(core(), device), "resetting statistics");
}

void Allocator::resetPeakStats(c10::DeviceIndex device)
{
  check(capi().reset_peak_stats(core(), device), "resetting peaks");
}

} // namespace esper
