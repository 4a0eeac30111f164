// The Python functions of all helpers, which module.cpp adds to the module. Eager code calls these,
// because they cost less than operators. Operators are for torch.compile, for traces and for
// callers of torch.ops.
#pragma once

#include <Python.h>

#include <vector>

#include "gather_op.h"
#include "normalize_op.h"

namespace esper
{

// One table for each helper, which ends with an empty entry. A new helper adds its own.
inline std::vector<PyMethodDef *> helper_methods()
{
  return {gather_methods, normalize_methods};
}

} // namespace esper
