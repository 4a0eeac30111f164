#include "workspaces.h"

#include <ATen/cuda/CUDAContextLight.h>

#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../start/the_core.h"

namespace esper
{
namespace
{

using Workspaces = decltype(at::cuda::WorkspaceMapWithMutex::map);
using Resting = std::multimap<Workspaces::key_type, Workspaces::mapped_type>;

template <typename Workspace>
bool sleeps(const Workspace &workspace)
{
  const void *address = nullptr;
  if constexpr (std::is_same_v<Workspace, at::DataPtr>) {
    address = workspace.get();
  } else { // newer versions of PyTorch keep its size beside it
    address = workspace.first.get();
  }
  esper_block_info block;
  return capi().find_block(core(), address, &block) == ESPER_OK && block.asleep != 0;
}

// Nothing is allocated or freed under PyTorch's lock: another thread may wait for it with Python's.
void update(at::cuda::WorkspaceMapWithMutex &workspaces, Resting &resting)
{
  const std::unique_lock<std::shared_mutex> lock(workspaces.mutex);
  for (auto next = workspaces.map.begin(); next != workspaces.map.end();) {
    const auto at = next++;
    if (sleeps(at->second)) {
      resting.insert(workspaces.map.extract(at));
    }
  }
  for (auto next = resting.begin(); next != resting.end();) {
    const auto at = next++;
    if (workspaces.map.count(at->first) == 0 && !sleeps(at->second)) {
      workspaces.map.insert(resting.extract(at));
    }
  }
}

} // namespace

void update_workspaces()
{
  static auto &resting = *new std::pair<Resting, Resting>(); // never destroyed: CUDA may end first
  update(at::cuda::cublas_handle_stream_to_workspace(), resting.first);
  update(at::cuda::cublaslt_handle_stream_to_workspace(), resting.second);
}

} // namespace esper
