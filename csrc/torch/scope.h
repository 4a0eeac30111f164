// The steps of `with esper_alloc.using(...)`, and what is said of a stream, as
// Python functions.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/python_headers.h>

namespace esper
{

// Orders the future work of `waiter` after the work enqueued on `on` so far.
void wait_for(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

// enter_stream(stream) -> state: makes `stream` wait for the current stream
// and current. A stream of another device makes that device current too.
PyObject *enter_stream(PyObject *module, PyObject *stream);

// leave_stream(tensors, stream, state): marks and restores.
PyObject *leave_stream(PyObject *module, PyObject *const *args, Py_ssize_t count);

// hand_over(tensors, stream): makes the current stream wait for `stream`, and
// protects `tensors` on it until they are freed.
PyObject *hand_over(PyObject *module, PyObject *const *args, Py_ssize_t count);

// set_stream_traits(stream, rendezvous).
PyObject *set_stream_traits(PyObject *module, PyObject *const *args, Py_ssize_t count);

} // namespace esper
