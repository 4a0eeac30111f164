// The Python functions of each helper: module.cpp puts them into the module.
//
// Operators are for torch.compile, for traces and for whoever calls torch.ops.
// Eager code calls these functions instead, which cost less.
#pragma once

#include <Python.h>

#include <vector>

#include "gather_op.h"
#include "normalize_op.h"

namespace esper
{

// One table for each helper, ended by an empty entry. A new helper adds its own.
inline std::vector<PyMethodDef *> helper_methods()
{
  return {gather_methods, normalize_methods};
}

} // namespace esper
