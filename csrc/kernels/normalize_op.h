// The Python functions of the normalisers, for methods.h.
#pragma once

#include <Python.h>

namespace esper
{

extern PyMethodDef normalize_methods[];

} // namespace esper
