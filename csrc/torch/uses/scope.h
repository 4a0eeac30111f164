// Python functions for the steps of `with esper_alloc.using(...)`, and for captures.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/python_headers.h>

namespace esper
{

// Orders the future work of `waiter` after the work enqueued on `on` so far.
void wait_for(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

// enter_stream(stream) -> state: makes `stream` wait for the current stream, and makes it current.
// If it is of another device, that device becomes current, too.
PyObject *enter_stream(PyObject *module, PyObject *stream);

// leave_stream(tensors, stream, state): marks the tensors and restores the state.
PyObject *leave_stream(PyObject *module, PyObject *const *args, Py_ssize_t count);

// hand_over(tensors, stream): makes the current stream wait for `stream`, and protects `tensors` on
// the current stream until they are freed.
PyObject *hand_over(PyObject *module, PyObject *const *args, Py_ssize_t count);

// announce_capture(device, begins) -> bool: a capture begins or has ended. False: the allocator
// does not serve PyTorch, or not in this forked child, so nothing was noted.
PyObject *announce_capture(PyObject *module, PyObject *const *args, Py_ssize_t count);

} // namespace esper
