// The findings of the process's audit, for Python.
#pragma once

#include <torch/csrc/python_headers.h>

#include "../debugging/fence.h"

namespace esper::auditing
{

// A list of dicts: a new reference, or null with a Python exception.
PyObject *describe_findings();

// What is known of memory that was freed behind a fence, as a dict; of the last frees a list, the
// latest first. New references, or null with a Python exception.
PyObject *describe_freed(const fence::Freed &freed);
PyObject *describe_last_freed(size_t most, bool only_in_use);

} // namespace esper::auditing
