#include "saving.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/graph_task.h>

namespace esper
{

// A hook that packs can be told by its being set, and forward by forward-mode AD, which only it turns
// off: it, and inference mode. Inference tensors cannot be saved.
MaySave may_save_itself()
{
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) {
    return MaySave::everything;
  }
  const auto &state = c10::AutogradState::get_tls_state();
  if (state.get_fw_grad_mode()) {
    return MaySave::nothing;
  }
  return state.get_inference_mode() ? MaySave::unless_inference : MaySave::everything;
}

bool in_backward()
{
  return torch::autograd::get_current_graph_task_id() != -1;
}

} // namespace esper
