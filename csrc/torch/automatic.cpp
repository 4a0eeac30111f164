#include "automatic.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <mutex>

#include "core_api.h"
#include "observer.h"
#include "stream.h"

namespace esper
{

std::atomic<bool> detail::waiting_for_stream{false};

namespace
{

using c10::cuda::CUDAStream;

std::mutex switching;
std::atomic<at::CallbackHandle> callback{at::INVALID_CALLBACK_HANDLE};

bool has_callback()
{
  return callback.load(std::memory_order_relaxed) != at::INVALID_CALLBACK_HANDLE;
}

void note(const Access &access)
{
  if (esper_core *made = core_if_made()) {
    check(capi().note_use(made, access.data, to_esper(access.stream)), "noting a use");
  }
}

std::unique_ptr<at::ObserverContext> note_inputs(const at::RecordFunction &operation)
{
  std::exception_ptr failure;
  for (const c10::IValue &input : operation.inputs()) {
    try {
      each_access(input, note);
    } catch (...) { // no host memory; the others are noted
      failure = std::current_exception();
    }
  }
  if (C10_UNLIKELY(failure != nullptr)) {
    std::rethrow_exception(failure);
  }
  return nullptr;
}

// PyTorch makes all streams of a device's pools at once. Before that their handles are null.
bool pools_have_streams(c10::DeviceIndex device)
{
  constexpr c10::StreamId first_of_pool = 3; // number 0, of priority 0, from a pool
  return CUDAStream::unpack3(first_of_pool, device, c10::DeviceType::CUDA).stream() != nullptr;
}

void note_object(PyObject *value)
{
  if (THPVariable_Check(value)) {
    each_access(*THPVariable_Unpack(value).unsafeGetTensorImpl(), note);
    return;
  }
  if (!PyTuple_Check(value) && !PyList_Check(value)) {
    return;
  }
  if (Py_EnterRecursiveCall(" while looking for tensors") != 0) {
    throw python_error();
  }
  struct Leave {
    ~Leave()
    {
      Py_LeaveRecursiveCall();
    }
  } leave;
  if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      note_object(PyTuple_GET_ITEM(value, i));
    }
  } else {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      note_object(PyList_GET_ITEM(value, i));
    }
  }
}

} // namespace

// The callback comes first: an operator that misses it works on memory that is live already. If the
// rest fails, the next allocation or free tries again.
void detail::begin_observing() noexcept
{
  try {
    std::lock_guard<std::mutex> lock(switching);
    if (!waiting_for_stream.load()) {
      return;
    }
    if (!has_callback()) {
      callback.store(at::addGlobalCallback(at::RecordFunctionCallback(note_inputs)
                                               .needsInputs(true)
                                               .scopes({at::RecordScope::FUNCTION})));
    }
    esper_core *made = core_if_made();
    if (made == nullptr || capi().note_unseen_uses(made) == ESPER_OK) {
      waiting_for_stream.store(false);
    }
  } catch (const std::exception &) {
    // No host memory.
  }
}

void detail::begin_if_streams_exist() noexcept
{
  static const c10::DeviceIndex devices = c10::cuda::device_count();
  for (c10::DeviceIndex device = 0; device < devices; ++device) {
    if (pools_have_streams(device)) {
      begin_observing();
      return;
    }
  }
}

bool are_uses_noted()
{
  return has_callback();
}

void set_automatic_uses(bool on)
{
  std::lock_guard<std::mutex> lock(switching);
  if (on) {
    if (!has_callback()) {
      detail::waiting_for_stream.store(true);
    }
    return;
  }
  detail::waiting_for_stream.store(false);
  if (has_callback()) {
    at::removeCallback(callback.exchange(at::INVALID_CALLBACK_HANDLE));
  }
}

PyObject *automatic_uses(PyObject * /*module*/, PyObject *on)
{
  HANDLE_TH_ERRORS
  const int truth = PyObject_IsTrue(on);
  if (truth < 0) {
    throw python_error();
  }
  set_automatic_uses(truth != 0);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *observe_now(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  detail::begin_observing();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *is_observing(PyObject * /*module*/, PyObject * /*none*/)
{
  return PyBool_FromLong(has_callback());
}

PyObject *note_uses(PyObject * /*module*/, PyObject *values)
{
  HANDLE_TH_ERRORS
  if (has_callback()) {
    note_object(values);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace esper
