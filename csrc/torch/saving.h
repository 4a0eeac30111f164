// Whether autograd may save what this thread marks, although it records no operation.
#pragma once

namespace esper
{

enum class MaySave {
  nothing,
  unless_inference, // tensors made outside of inference mode
  everything
};

// What code that autograd calls may save: the forward of a custom function, or a hook that packs a
// saved tensor.
MaySave may_save_itself();

// Whether this thread runs backward. Grad mode is off there, but a node that runs later may have saved
// what a hook marks.
bool in_backward();

} // namespace esper
