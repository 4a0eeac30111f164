// The findings of the process's audit, for Python.
#pragma once

#include <torch/csrc/python_headers.h>

namespace esper
{

namespace auditing
{

// A list of dicts: a new reference, or null with a Python exception.
PyObject *describe_findings();

} // namespace auditing

} // namespace esper
