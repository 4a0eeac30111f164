#include "scope.h"

#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/Exceptions.h>

#include "../base/core_api.h"
#include "../base/current.h"
#include "../base/gil.h"
#include "../start/the_core.h"
#include "use.h"

namespace esper
{
namespace
{

using c10::cuda::CUDAStream;

// Events for waits between streams. They are pooled, because creating one can take milliseconds
// while the device is busy. They are never destroyed, because at exit the driver may be gone.
c10::cuda::CUDAEventPool &wait_events()
{
  static auto *events = new c10::cuda::CUDAEventPool();
  return *events;
}

CUDAStream cuda_stream(PyObject *object)
{
  const auto stream = unwrap_stream(object);
  TORCH_CHECK_TYPE(stream.has_value(), "stream must be a stream of a CUDA device");
  return *stream;
}

// What enter_stream() replaced, as a tuple of integers for Python to keep.
struct Before {
  c10::DeviceIndex device;
  CUDAStream stream; // the current stream of the entered stream's device
};

PyObject *to_python(const Before &before)
{
  return Py_BuildValue("(iLi)", static_cast<int>(before.device),
                       static_cast<long long>(before.stream.id()),
                       static_cast<int>(before.stream.device_index()));
}

Before from_python(PyObject *state)
{
  int device = 0;
  int stream_device = 0;
  long long stream_id = 0;
  if (!PyArg_ParseTuple(state, "iLi", &device, &stream_id, &stream_device)) {
    throw python_error();
  }
  return {static_cast<c10::DeviceIndex>(device),
          CUDAStream::unpack3(stream_id, static_cast<c10::DeviceIndex>(stream_device),
                              c10::DeviceType::CUDA)};
}

void restore(const Before &before)
{
  c10::cuda::setCurrentCUDAStream(before.stream);
  c10::cuda::set_device(before.device);
}

void check_arguments(const char *name, Py_ssize_t count, Py_ssize_t expected)
{
  TORCH_CHECK_TYPE(count == expected, name, "() takes ", expected, " arguments");
}

void gather(Gathering &found, PyObject *tensors)
{
  TORCH_CHECK_TYPE(PyTuple_Check(tensors), "tensors must be a tuple");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    found.add_argument(PyTuple_GET_ITEM(tensors, i));
  }
}

} // namespace

void wait_for(CUDAStream waiter, CUDAStream on)
{
  if (waiter == on) {
    return;
  }
  const auto event = wait_events().get(on.device_index());
  event->record(on);
  event->block(waiter); // which keeps what the event stood for, so it may be recorded again
}

PyObject *enter_stream(PyObject * /*module*/, PyObject *stream)
{
  HANDLE_TH_ERRORS
  const CUDAStream entered = cuda_stream(stream);
  const c10::DeviceIndex device = c10::cuda::current_device();
  const CUDAStream from = c10::cuda::getCurrentCUDAStream(device);
  const Before before{device, c10::cuda::getCurrentCUDAStream(entered.device_index())};
  {
    pybind11::gil_scoped_release no_gil;
    // When the device changes, the tensors may come from either stream.
    wait_for(entered, from);
    wait_for(entered, before.stream);
  }
  c10::cuda::set_device(entered.device_index());
  c10::cuda::setCurrentCUDAStream(entered);
  return to_python(before);
  END_HANDLE_TH_ERRORS
}

PyObject *leave_stream(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  check_arguments("leave_stream", count, 3);
  const Before before = from_python(args[2]);
  End end;
  end.stream = cuda_stream(args[1]);
  end.until_free = autograd_may_read();
  try {
    Gathering found;
    gather(found, args[0]);
    PythonEnd python_end;
    python_end.stream = args[1];
    found.mark(end, python_end);
  } catch (...) {
    restore(before);
    throw;
  }
  restore(before);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *hand_over(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  check_arguments("hand_over", count, 2);
  const CUDAStream from = cuda_stream(args[1]);
  End here, there;
  here.stream = c10::cuda::getCurrentCUDAStream();
  // Tensors of another device are read there, on that device's current stream.
  there.stream = c10::cuda::getCurrentCUDAStream(from.device_index());
  here.until_free = there.until_free = true;
  Gathering found;
  gather(found, args[0]);
  {
    pybind11::gil_scoped_release no_gil;
    wait_for(*here.stream, from);
    if (*there.stream != *here.stream) {
      wait_for(*there.stream, from);
    }
  }
  // The current stream is meant for what Python marks, too.
  found.mark(here, PythonEnd{});
  if (*there.stream != *here.stream) {
    found.mark(there, PythonEnd{});
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *announce_capture(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  check_arguments("announce_capture", count, 2);
  const long device = PyLong_AsLong(args[0]);
  if (device == -1 && PyErr_Occurred() != nullptr) {
    throw python_error();
  }
  // Memory may be asked for within the capture for the first time.
  esper_core *serving = is_current() ? core_unless_forked() : core_that_serves();
  if (serving == nullptr) {
    Py_RETURN_FALSE;
  }
  esper_status status = ESPER_OK;
  {
    const WithoutGil released; // an event that is being recorded is waited for
    status = args[1] == Py_True ? capi().capture_begin(serving, static_cast<int>(device))
                                : capi().capture_end(serving, static_cast<int>(device));
  }
  check(status, "announcing a capture");
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

} // namespace esper
