// Unwraps PyTorch's Python objects without running Python code.
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/util/FunctionRef.h>
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

// What a function of Python's C interface returned. If that is null, throws the exception.
PyObject *expect(PyObject *returned);

// Goes one level deeper into nested containers. Throws if Python's limit is reached.
class Descent
{
public:
  Descent();
  ~Descent();
  Descent(const Descent &) = delete;
  Descent &operator=(const Descent &) = delete;
};

// Finds the classes that torch.cuda and torch.cpu define. Called once, at import. False, with a
// Python exception set: this torch lacks one.
bool find_torch_classes();

// The CUDA stream of a torch.Stream or torch.cuda.Stream; nothing for a stream of another kind of
// device. Throws TypeError for any other object.
std::optional<c10::cuda::CUDAStream> unwrap_stream(PyObject *object);

// Whether it is a torch.cpu.Stream, which is not a torch.Stream and does nothing.
bool is_cpu_stream(PyObject *object);

// A CUDA event that was recorded.
struct RecordedEvent {
  cudaEvent_t handle;
  c10::DeviceIndex device;
};

// The event of a torch.cuda.Event or torch.Event. Throws TypeError for other objects, and
// ValueError for an event that was never recorded, because the driver calls such an event complete.
RecordedEvent unwrap_event(PyObject *object);

// Shows the tensors in tuples and lists, to any depth. Other objects are passed over.
void each_tensor(PyObject *value, c10::function_ref<void(const c10::TensorImpl &)> show);

} // namespace esper
