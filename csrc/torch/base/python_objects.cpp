#include "python_objects.h"

#include <torch/csrc/Event.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/cuda/Event.h>

namespace esper
{
namespace
{

// torch._C._CudaEventBase. PyTorch does not export the variable that holds it.
PyTypeObject *cuda_event_type = nullptr;
// torch.cpu.Stream, which is defined in Python.
PyTypeObject *cpu_stream_type = nullptr;

// A class, kept alive for ever.
PyTypeObject *find_class(const char *module_name, const char *name)
{
  Reference module(PyImport_ImportModule(module_name));
  return module ? reinterpret_cast<PyTypeObject *>(PyObject_GetAttrString(module.get(), name))
                : nullptr;
}

} // namespace

PyObject *expect(PyObject *returned)
{
  if (returned == nullptr) {
    throw python_error();
  }
  return returned;
}

Descent::Descent()
{
  if (Py_EnterRecursiveCall(" while looking for tensors") != 0) {
    throw python_error();
  }
}

Descent::~Descent()
{
  Py_LeaveRecursiveCall();
}

bool find_torch_classes()
{
  cuda_event_type = find_class("torch._C", "_CudaEventBase");
  if (cuda_event_type != nullptr) {
    cpu_stream_type = find_class("torch.cpu", "Stream");
  }
  return cpu_stream_type != nullptr;
}

bool is_cpu_stream(PyObject *object)
{
  return PyObject_TypeCheck(object, cpu_stream_type);
}

std::optional<c10::cuda::CUDAStream> unwrap_stream(PyObject *object)
{
  TORCH_CHECK_TYPE(PyObject_TypeCheck(object, THPStreamClass),
                   "stream must be a torch.cuda.Stream or None, not ", Py_TYPE(object)->tp_name,
                   PyLong_Check(object) ? ": wrap a handle in torch.cuda.ExternalStream" : "");
  const auto *stream = reinterpret_cast<THPStream *>(object);
  const auto type = static_cast<c10::DeviceType>(stream->device_type);
  if (type != c10::DeviceType::CUDA) {
    return std::nullopt;
  }
  return c10::cuda::CUDAStream::unpack3(stream->stream_id,
                                        static_cast<c10::DeviceIndex>(stream->device_index), type);
}

RecordedEvent unwrap_event(PyObject *object)
{
  constexpr const char *unrecorded =
      "event was not recorded yet: call event.record(stream) right after the "
      "last read, then pass it";
  if (PyObject_TypeCheck(object, cuda_event_type)) {
    const auto &event = reinterpret_cast<THCPEvent *>(object)->cuda_event;
    // CUDA's event is created by its first record.
    TORCH_CHECK_VALUE(event.isCreated(), unrecorded);
    return {event.event(), event.device_index()};
  }
  TORCH_CHECK_TYPE(PyObject_TypeCheck(object, THPEventClass),
                   "event must be a torch.cuda.Event or None, not ", Py_TYPE(object)->tp_name);
  const auto &event = reinterpret_cast<THPEvent *>(object)->event;
  TORCH_CHECK_TYPE(event.device_type() == c10::DeviceType::CUDA,
                   "event must be an event of a CUDA device, not of ", event.device_type());
  TORCH_CHECK_VALUE(event.was_marked_for_recording(), unrecorded);
  return {static_cast<cudaEvent_t>(event.eventId()), event.device_index()};
}

void each_tensor(PyObject *value, c10::function_ref<void(const c10::TensorImpl &)> show)
{
  if (THPVariable_Check(value)) {
    show(*THPVariable_Unpack(value).unsafeGetTensorImpl());
    return;
  }
  if (!PyTuple_Check(value) && !PyList_Check(value)) {
    return;
  }
  const Descent descent;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
    each_tensor(PySequence_Fast_GET_ITEM(value, i), show);
  }
}

} // namespace esper
