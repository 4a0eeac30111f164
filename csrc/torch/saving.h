// Whether autograd may save what this thread marks, although it records no operation.
#pragma once

#include <ATen/core/Tensor.h>

namespace esper
{

// Whether this thread runs backward. Grad mode is off there, but a node that runs later may have
// saved what a hook marks.
bool in_backward();

// What code that autograd calls may save: the forward of a custom function, or a hook that packs a
// saved tensor.
class MaySave
{
public:
  static MaySave everything();
  // What the code that makes the mark may save. Inference mode hides forward, so there each tensor
  // is asked about.
  static MaySave itself();

  // Whether it can be `tensor`. Null: any tensor.
  bool operator()(const at::Tensor *tensor = nullptr) const;

  bool is_everything() const
  {
    return kind_ == Kind::everything;
  }

private:
  enum class Kind { nothing, forward, everything };
  explicit MaySave(Kind kind) : kind_(kind)
  {
  }
  Kind kind_; // forward: everything but inference tensors, if the forward of a custom function runs
};

} // namespace esper
