// The core's snapshot in PyTorch's structure, which memory_viz and other viewers read.
#include "../base/allocator.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>

#include "../start/the_core.h"
#include "history.h"

namespace esper
{
namespace
{

using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::SegmentInfo;
using CommonConfig = c10::CachingAllocator::AcceleratorAllocatorConfig;
using CudaConfig = native::CUDAAllocatorConfig;

// A snapshot of the core, freed at the end of the scope.
class CoreSnapshot
{
public:
  explicit CoreSnapshot(int device)
  {
    check(capi().snapshot_take(core(), device, &snapshot_), "taking a snapshot");
  }
  ~CoreSnapshot()
  {
    capi().snapshot_free(&snapshot_);
  }
  CoreSnapshot(const CoreSnapshot &) = delete;
  CoreSnapshot &operator=(const CoreSnapshot &) = delete;

  const esper_segment_entry *begin() const
  {
    return snapshot_.segments;
  }
  const esper_segment_entry *end() const
  {
    return snapshot_.segments + snapshot_.segment_count;
  }
  const esper_block_entry *blocks_of(const esper_segment_entry &segment) const
  {
    return snapshot_.blocks + segment.first_block;
  }
  const esper_use_entry *uses_of(const esper_block_entry &block) const
  {
    return snapshot_.uses + block.first_use;
  }

private:
  esper_snapshot snapshot_{};
};

BlockInfo convert(const esper_block_entry &from)
{
  BlockInfo to;
  to.size = from.size;
  to.requested_size = from.requested;
  to.allocated = from.state == ESPER_BLOCK_ALLOCATED;
  // Shown as "active_pending_free" unless allocated: freed, but a use on another stream, not a
  // loan, has not completed.
  to.active = from.state != ESPER_BLOCK_INACTIVE;
  return to;
}

SegmentInfo convert(const esper_segment_entry &from, const esper_block_entry *blocks)
{
  SegmentInfo to;
  to.device = static_cast<c10::DeviceIndex>(from.device);
  to.address = from.address;
  to.total_size = from.size;
  to.stream = from.stream;
  to.is_large = from.large != 0;
  to.is_expandable = from.mapped != 0;
  to.owner_private_pool_id = {from.pool[0], from.pool[1]};
  to.registration_counter =
      static_cast<int32_t>(std::min<uint64_t>(from.birth, std::numeric_limits<int32_t>::max()));
  to.context_when_allocated = context_of_segment(from.device, from.address);
  to.blocks.reserve(from.block_count);
  for (size_t i = 0; i < from.block_count; ++i) {
    BlockInfo block = convert(blocks[i]);
    if (block.active) {
      block.context_when_allocated = context_of_block(from.device, blocks[i].address);
    }
    if (block.allocated) {
      to.allocated_size += block.size;
    }
    if (block.active) {
      to.active_size += block.size;
      to.requested_size += block.requested_size;
    }
    to.blocks.push_back(std::move(block));
  }
  return to;
}

const char *name_of(unsigned kind)
{
  if (kind & ESPER_ENTRY_CAPTURED) {
    return "captured";
  }
  if (kind & ESPER_ENTRY_HELD) {
    return "held";
  }
  if (kind & ESPER_ENTRY_AT_FREE) {
    return "until_free";
  }
  return "record_use";
}

AnnotationEntry annotation(int device, const char *name, const std::string &stage)
{
  AnnotationEntry made(static_cast<c10::DeviceIndex>(device), c10::approx_time_t{});
  made.time_.t_ = microseconds_since_1970();
  made.recordUserMetadata("name", name);
  made.recordUserMetadata("stage", stage);
  return made;
}

// PyTorch's structure has no field for a block's uses, so each becomes an annotation, which other
// viewers ignore. with_uses() of esper_alloc.replay.snapshot attaches them to their blocks.
AnnotationEntry convert(const esper_segment_entry &segment, const esper_block_entry &block,
                        const esper_use_entry &use)
{
  AnnotationEntry to = annotation(segment.device, "esper_alloc.use", "PENDING");
  to.recordUserMetadata("address", std::to_string(block.address));
  to.recordUserMetadata("stream_device", std::to_string(use.device));
  to.recordUserMetadata("stream", std::to_string(reinterpret_cast<uintptr_t>(use.stream)));
  to.recordUserMetadata("number", std::to_string(use.number));
  to.recordUserMetadata("kind", name_of(use.kind));
  return to;
}

// The tag of a segment, and how much of it sleeps. Its sizes are as if it were awake.
AnnotationEntry describe_tag(const esper_segment_entry &segment)
{
  AnnotationEntry to =
      annotation(segment.device, "esper_alloc.tag", segment.asleep != 0 ? "ASLEEP" : "AWAKE");
  to.recordUserMetadata("address", std::to_string(segment.address));
  to.recordUserMetadata("tag", segment.tag);
  to.recordUserMetadata("asleep_size", std::to_string(segment.asleep));
  return to;
}

// What PyTorch's structure of settings has no field for.
AnnotationEntry describe_allowance()
{
  esper_config config;
  capi().get_config(core(), &config);
  return annotation(0, "esper_alloc.allowance",
                    config.allowance == ESPER_ALLOWANCE_OFF ? "off"
                                                            : std::to_string(config.allowance));
}

// Options of the host allocator, which newer versions list, too.
template <class Info, class Config = CommonConfig>
auto describe_host_cache(Info &info, int) -> decltype(info.max_cached_size, void())
{
  info.max_round_threshold = Config::pinned_max_round_threshold();
  info.max_cached_size = Config::pinned_max_cached_size();
}
template <class Info>
void describe_host_cache(Info &, long)
{
}

native::AllocatorConfigInfo describe_options()
{
  native::AllocatorConfigInfo info{};
  info.garbage_collection_threshold = CommonConfig::garbage_collection_threshold();
  info.max_split_size = CommonConfig::max_split_size();
  info.pinned_num_register_threads = CudaConfig::pinned_num_register_threads();
  info.expandable_segments = CommonConfig::use_expandable_segments();
  info.release_lock_on_malloc = CudaConfig::release_lock_on_cudamalloc();
  info.pinned_use_host_register = CudaConfig::pinned_use_cuda_host_register();
  info.graph_capture_record_stream_reuse = CudaConfig::graph_capture_record_stream_reuse();
  info.last_allocator_settings = CommonConfig::last_allocator_settings();
  info.roundup_power2_divisions = CommonConfig::roundup_power2_divisions();
  describe_host_cache(info, 0);
  return info;
}

} // namespace

native::SnapshotInfo Allocator::snapshot(c10::MempoolId_t pool, bool include_traces)
{
  constexpr int every_device = -1;
  const bool every_pool = pool == c10::MempoolId_t{0, 0};
  native::SnapshotInfo info;
  const int devices = capi().device_count(core());
  info.device_traces.resize(static_cast<size_t>(devices));
  if (include_traces) { // before this snapshot is added to them
    for (int device = 0; device < devices; ++device) {
      info.device_traces[static_cast<size_t>(device)] = copy_trace(device);
    }
    info.external_annotations = copy_annotations();
  }
  const CoreSnapshot picture(every_device);
  std::vector<size_t> active(static_cast<size_t>(devices), 0);
  std::vector<AnnotationEntry> more{describe_allowance()};
  for (const esper_segment_entry &segment : picture) {
    if (!every_pool && pool != c10::MempoolId_t{segment.pool[0], segment.pool[1]}) {
      continue;
    }
    const esper_block_entry *blocks = picture.blocks_of(segment);
    info.segments.push_back(convert(segment, blocks));
    active[static_cast<size_t>(segment.device)] += info.segments.back().active_size;
    if (segment.asleep != 0 || *segment.tag != '\0') {
      more.push_back(describe_tag(segment));
    }
    for (size_t i = 0; i < segment.block_count; ++i) {
      for (unsigned j = 0; j < blocks[i].uses; ++j) {
        more.push_back(convert(segment, blocks[i], picture.uses_of(blocks[i])[j]));
      }
    }
  }
  for (int device = 0; device < devices; ++device) {
    trace_snapshot(device, active[static_cast<size_t>(device)], pool);
  }
  std::move(more.begin(), more.end(), std::back_inserter(info.external_annotations));
  info.config_metadata = describe_options();
  return info;
}

std::vector<native::StreamSegmentSize> Allocator::getExpandableSegmentSizes(c10::DeviceIndex device)
{
  std::vector<native::StreamSegmentSize> sizes;
  const CoreSnapshot picture(device);
  for (const esper_segment_entry &segment : picture) {
    if (segment.mapped) {
      sizes.emplace_back(static_cast<cudaStream_t>(segment.stream), segment.large == 0,
                         segment.size);
    }
  }
  return sizes;
}

} // namespace esper
