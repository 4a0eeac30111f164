// The steps of `with esper_alloc.using(...)`, as Python functions.
#pragma once

#include <torch/csrc/python_headers.h>

namespace esper {

// enter_stream(stream) -> state: makes `stream` wait for the current stream
// and current. A stream of another device makes that device current too.
PyObject* enter_stream(PyObject* module, PyObject* stream);

// leave_stream(tensors, stream, state): marks and restores.
PyObject* leave_stream(
    PyObject* module,
    PyObject* const* args,
    Py_ssize_t count);

// hand_over(tensors, stream): makes the current stream wait for `stream`, and
// protects `tensors` on it until they are freed.
PyObject* hand_over(PyObject* module, PyObject* const* args, Py_ssize_t count);

} // namespace esper
