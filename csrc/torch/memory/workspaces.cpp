#include "workspaces.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "../start/the_core.h"

namespace esper
{
namespace
{

class Sleeping
{
public:
  Sleeping(const char *const *tags, std::size_t count, int device)
      : tags_(tags, tags + count), device_(device)
  {
  }
  // The block of a workspace that sleeps.
  bool has(const at::DataPtr &workspace, esper_block_info &block) const
  {
    return capi().find_block(core(), workspace.get(), &block) == ESPER_OK &&
           (device_ == -1 || device_ == block.device) &&
           std::find(tags_.begin(), tags_.end(), block.tag) != tags_.end();
  }

private:
  std::vector<std::string_view> tags_;
  int device_;
};

at::DataPtr like(const esper_block_info &block, void *stream)
{
  const auto device = static_cast<c10::DeviceIndex>(block.device);
  const c10::cuda::CUDAStreamGuard guard(
      c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), device));
  return c10::cuda::CUDACachingAllocator::get()->allocate(block.requested);
}

void replace(at::cuda::WorkspaceMapWithMutex &workspaces, const Sleeping &sleeping)
{
  static std::mutex mutex;
  static auto *old = new std::vector<at::DataPtr>();
  const std::unique_lock<std::shared_mutex> lock(workspaces.mutex);
  const std::lock_guard<std::mutex> old_lock(mutex);
  esper_block_info block;
  for (auto at = workspaces.map.begin(); at != workspaces.map.end();) {
    if (!sleeping.has(at->second, block)) {
      ++at;
      continue;
    }
    old->push_back(std::move(at->second));
    try {
      at->second = like(block, std::get<1>(at->first));
      ++at;
    } catch (const c10::Error &) { // no memory: PyTorch tries again when it needs one
      at = workspaces.map.erase(at);
    }
  }
}

} // namespace

void replace_workspaces(const char *const *tags, std::size_t count, int device)
{
  const Sleeping sleeping(tags, count, device);
  replace(at::cuda::cublas_handle_stream_to_workspace(), sleeping);
  replace(at::cuda::cublaslt_handle_stream_to_workspace(), sleeping);
}

} // namespace esper
