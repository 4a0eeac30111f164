#include "automatic.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "../base/core_api.h"
#include "../base/python_objects.h"
#include "../base/stream.h"
#include "operator_memory.h"

namespace esper
{

namespace
{

using c10::cuda::CUDAStream;

// Devices that may have memory, a bit each. Known only while a stream is waited for.
std::atomic<uint64_t> devices_with_memory{0};
constexpr c10::DeviceIndex most_devices = 64;

std::mutex switching;
std::atomic<at::CallbackHandle> callback{at::INVALID_CALLBACK_HANDLE};

bool has_callback()
{
  return callback.load(std::memory_order_relaxed) != at::INVALID_CALLBACK_HANDLE;
}

// What an operator uses. Its tensors are mostly on one device, so they are noted together, and the
// current stream is asked for once.
class Uses
{
  static constexpr size_t most = 16;
  const void *addresses_[most];
  size_t count_ = 0;
  c10::DeviceIndex device_ = -1;
  std::exception_ptr failure_;

  void note()
  {
    esper_core *made = core_if_made();
    try {
      if (made != nullptr) {
        const esper_stream stream = to_esper(c10::cuda::getCurrentCUDAStream(device_));
        check(capi().note_use(made, addresses_, count_, stream), "noting a use");
      }
    } catch (...) { // it sleeps, or there is no host memory; the others are noted
      failure_ = std::current_exception();
    }
    count_ = 0;
  }

public:
  template <class Value>
  void add(const Value &value)
  {
    each_storage(value, [this](const void *data, c10::DeviceIndex device, const c10::TensorImpl &) {
      if (C10_UNLIKELY(count_ == most || device != device_)) {
        note_added();
        device_ = device;
      }
      addresses_[count_++] = data;
    });
  }

  void note_added()
  {
    if (count_ > 0) {
      note();
    }
  }

  void finish()
  {
    note_added();
    if (C10_UNLIKELY(failure_ != nullptr)) {
      std::rethrow_exception(failure_);
    }
  }

  // For a callback: PyTorch would log what it throws, with a stack, and run the operator.
  void finish_with_a_warning()
  {
    try {
      finish();
    } catch (const c10::Error &error) {
      TORCH_WARN_ONCE("esper_alloc: an operator's use of memory was not noted: ",
                      error.what_without_backtrace());
    }
  }
};

// An operator begins: the current stream uses each tensor among its inputs, until it is freed.
std::unique_ptr<at::ObserverContext> note_inputs(const at::RecordFunction &operation)
{
  Uses uses;
  for (const c10::IValue &input : operation.inputs()) {
    uses.add(input);
  }
  uses.finish_with_a_warning();
  return nullptr;
}

// PyTorch makes all streams of a device's pools at once. Before that their handles are null.
bool pools_have_streams(c10::DeviceIndex device)
{
  constexpr c10::StreamId first_of_pool = 3; // number 0, of priority 0, from a pool
  return CUDAStream::unpack3(first_of_pool, device, c10::DeviceType::CUDA).stream() != nullptr;
}

// The first operator that a thread runs after the callback was added takes a lock of PyTorch's. In
// a child it may stay locked for ever, so the thread that forks takes and releases it before.
void fork_begins()
{
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

} // namespace

// The callback comes first: an operator that misses it works on memory that is live already. If the
// rest fails, the next allocation or free tries again.
void detail::begin_observing() noexcept
{
  try {
    std::lock_guard<std::mutex> lock(switching);
    if (!is_watched_by(Watcher::STREAMS)) {
      return;
    }
    if (!has_callback()) {
      static const int watched = pthread_atfork(fork_begins, nullptr, nullptr);
      (void)watched; // without host memory a child may hang, in a narrow window
      // A scripted function may launch fused kernels, which are no operators and show no inputs.
      callback.store(at::addGlobalCallback(
          at::RecordFunctionCallback(note_inputs)
              .needsInputs(true)
              .scopes({at::RecordScope::FUNCTION, at::RecordScope::TORCHSCRIPT_FUNCTION})));
    }
    esper_core *made = core_if_made();
    if (made == nullptr || capi().note_unseen_uses(made) == ESPER_OK) {
      set_watcher(Watcher::STREAMS, false);
    }
  } catch (const std::exception &) {
    // No host memory.
  }
}

void detail::expect_memory_on(c10::DeviceIndex device) noexcept
{
  if (device >= most_devices) {
    begin_observing(); // as if there were a stream
    return;
  }
  const uint64_t bit = uint64_t{1} << device;
  if (!(devices_with_memory.load(std::memory_order_relaxed) & bit)) {
    devices_with_memory.fetch_or(bit);
  }
}

// Every free comes here, and each question costs it some nanoseconds.
void detail::begin_if_streams_exist() noexcept
{
  uint64_t left = devices_with_memory.load(std::memory_order_relaxed);
  for (; left != 0; left &= left - 1) {
    if (pools_have_streams(static_cast<c10::DeviceIndex>(__builtin_ctzll(left)))) {
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
    if (!has_callback() && !is_watched_by(Watcher::STREAMS)) {
      const int devices = std::min(c10::cuda::device_count(), most_devices);
      if (core_if_made() != nullptr && devices > 0) {
        devices_with_memory.store(~uint64_t{0} >> (most_devices - devices)); // nobody knows which
      }
      set_watcher(Watcher::STREAMS, true);
    }
    return;
  }
  set_watcher(Watcher::STREAMS, false);
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
    Uses uses;
    each_tensor(values, [&](const c10::TensorImpl &tensor) { uses.add(tensor); });
    uses.finish();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace esper
