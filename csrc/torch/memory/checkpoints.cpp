#include "../base/allocator.h"

#include <cstdlib>
#include <vector>

#include "../base/gil.h"
#include "../start/the_core.h"
#include "deleter.h"

namespace esper
{
namespace
{

class CheckpointState final : public native::AllocatorState
{
public:
  explicit CheckpointState(esper_checkpoint *checkpoint)
      : checkpoint_(checkpoint, capi().checkpoint_free)
  {
  }

  const esper_checkpoint *get() const
  {
    return checkpoint_.get();
  }

private:
  std::unique_ptr<esper_checkpoint, esper_capi_checkpoint_free> checkpoint_;
};

} // namespace

std::shared_ptr<native::AllocatorState> Allocator::getCheckpointState(c10::DeviceIndex device,
                                                                      c10::MempoolId_t pool)
{
  esper_checkpoint *taken = nullptr;
  {
    const WithoutGil no_gil; // a call that is working in the pool may need it
    check(capi().checkpoint_take(core(), device, pool.first, pool.second, &taken),
          "taking a checkpoint");
  }
  return std::make_shared<CheckpointState>(taken);
}

native::CheckpointDelta Allocator::setCheckpointPoolState(
    c10::DeviceIndex device, std::shared_ptr<native::AllocatorState> state)
{
  const auto *ours = dynamic_cast<const CheckpointState *>(state.get());
  TORCH_CHECK(ours != nullptr,
              "esper_alloc, restoring a checkpoint: it was taken by another allocator");
  esper_checkpoint_delta raw{};
  {
    const WithoutGil no_gil;
    check(capi().checkpoint_restore(core(), ours->get(), &raw), "restoring a checkpoint");
  }
  std::unique_ptr<void *, decltype(&std::free)> pointers(raw.freed, &std::free);
  native::CheckpointDelta delta;
  delta.ptrs_freed.assign(raw.freed, raw.freed + raw.freed_count);
  delta.dataptrs_allocd.reserve(raw.live_count);
  for (size_t i = 0; i < raw.live_count; ++i) {
    delta.dataptrs_allocd.emplace_back(raw.live[i], raw.live[i], &delete_memory,
                                       c10::Device(c10::kCUDA, device));
  }
  return delta;
}

bool Allocator::checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                         const std::unordered_set<void *> &expected)
{
  const std::vector<const void *> addresses(expected.begin(), expected.end());
  int same = 0;
  const WithoutGil no_gil;
  check(capi().pool_live_are(core(), device, pool.first, pool.second, addresses.data(),
                             addresses.size(), &same),
        "looking at a pool's live memory");
  return same != 0;
}

} // namespace esper
