// PyTorch's Python objects, unwrapped without asking Python.
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <torch/csrc/python_headers.h>

#include <optional>

namespace esper
{

// Owns one reference.
class Reference
{
public:
  explicit Reference(PyObject *owned) : object_(owned)
  {
  }
  ~Reference()
  {
    Py_XDECREF(object_);
  }
  Reference(const Reference &) = delete;
  Reference &operator=(const Reference &) = delete;

  PyObject *get() const
  {
    return object_;
  }
  explicit operator bool() const
  {
    return object_ != nullptr;
  }

private:
  PyObject *object_;
};

// Finds the classes that torch.cuda and torch.cpu define. Called once, at import; returns
// false with a Python exception set where this torch lacks one.
bool find_torch_classes();

// A torch.Stream or torch.cuda.Stream as CUDA stream; nothing for a stream of
// another kind of device. Throws TypeError for any other object.
std::optional<c10::cuda::CUDAStream> unwrap_stream(PyObject *object);

// Whether it is a torch.cpu.Stream, which is no torch.Stream and does nothing.
bool is_cpu_stream(PyObject *object);

// An event of CUDA that was recorded.
struct RecordedEvent {
  cudaEvent_t handle;
  c10::DeviceIndex device;
};

// From a torch.cuda.Event or torch.Event. Throws TypeError for other objects
// and ValueError for an event that was never recorded: the driver calls such
// an event complete.
RecordedEvent unwrap_event(PyObject *object);

} // namespace esper
