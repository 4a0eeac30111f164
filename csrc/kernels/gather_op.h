// The gatherer: see gather_op.cpp.
#pragma once

#include <Python.h>

namespace esper
{

extern PyMethodDef gather_methods[];

} // namespace esper
