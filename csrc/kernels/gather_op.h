// The Python functions of the gatherer, for methods.h.
#pragma once

#include <Python.h>

namespace esper
{

extern PyMethodDef gather_methods[];

} // namespace esper
