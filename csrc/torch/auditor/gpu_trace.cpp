#include "gpu_trace.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/csrc/PyInterpreter.h>

#include <mutex>

namespace esper
{

namespace
{

using c10::impl::GPUTrace;
using c10::impl::PyInterpreter;
using c10::impl::PyInterpreterVTable;

std::atomic<const GpuTraceListener *> listener_now{nullptr};
std::atomic<const PyInterpreter *> previous{nullptr};

template <class... Parameters, class... Arguments>
void tell(void (*GpuTraceListener::*what)(Parameters...), Arguments... arguments)
{
  if (const GpuTraceListener *listener = listener_now.load(std::memory_order_acquire)) {
    (listener->*what)(arguments...);
  }
}

// PyTorch asks its tracer for nothing but trace_...; all else goes to the interpreter as it is.
class Tracer final : public PyInterpreterVTable
{
  using IntArrayRef = c10::IntArrayRef;
  using SymIntArrayRef = c10::SymIntArrayRef;

  static const PyInterpreterVTable &interpreter()
  {
    return **getPyInterpreter();
  }

public:
#define PASS_ON(result, name, parameters, arguments) \
  result name parameters const override              \
  {                                                  \
    return interpreter().name arguments;             \
  }
  PASS_ON(std::string, name, (), ())
  PASS_ON(void, incref, (PyObject * object), (object))
  PASS_ON(void, decref, (PyObject * object), (object))
  PASS_ON(bool, try_incref, (const c10::impl::PyObjectSlot &slot), (slot))
  PASS_ON(size_t, refcnt, (PyObject * object), (object))
  PASS_ON(c10::intrusive_ptr<c10::TensorImpl>, detach, (const c10::TensorImpl *self), (self))
  PASS_ON(void, dispatch, (const c10::OperatorHandle &op, torch::jit::Stack *stack), (op, stack))
  PASS_ON(void, reportErrorCallback, (PyObject * callback, c10::DispatchKey key), (callback, key))
  PASS_ON(void, python_op_registration_trampoline,
          (const c10::OperatorHandle &op, c10::DispatchKey key, c10::DispatchKeySet keyset,
           torch::jit::Stack *stack, bool with_keyset, bool with_op),
          (op, key, keyset, stack, with_keyset, with_op))
  PASS_ON(void, throw_abstract_impl_not_imported_error,
          (std::string opname, const char *pymodule, const char *context),
          (std::move(opname), pymodule, context))
  PASS_ON(void, python_dispatcher,
          (const c10::OperatorHandle &op, c10::DispatchKeySet keyset, torch::jit::Stack *stack),
          (op, keyset, stack))
  PASS_ON(bool, is_contiguous, (const c10::TensorImpl *self, at::MemoryFormat format),
          (self, format))
  PASS_ON(c10::SymBool, sym_is_contiguous, (const c10::TensorImpl *self, at::MemoryFormat format),
          (self, format))
  PASS_ON(bool, is_strides_like, (const c10::TensorImpl *self, at::MemoryFormat format),
          (self, format))
  PASS_ON(bool, is_non_overlapping_and_dense, (const c10::TensorImpl *self), (self))
  PASS_ON(c10::Device, device, (const c10::TensorImpl *self), (self))
  PASS_ON(int64_t, dim, (const c10::TensorImpl *self), (self))
  PASS_ON(IntArrayRef, strides, (const c10::TensorImpl *self), (self))
  PASS_ON(IntArrayRef, sizes, (const c10::TensorImpl *self), (self))
  PASS_ON(SymIntArrayRef, sym_sizes, (const c10::TensorImpl *self), (self))
  PASS_ON(c10::Layout, layout, (const c10::TensorImpl *self), (self))
  PASS_ON(int64_t, numel, (const c10::TensorImpl *self), (self))
  PASS_ON(c10::SymInt, sym_numel, (const c10::TensorImpl *self), (self))
  PASS_ON(SymIntArrayRef, sym_strides, (const c10::TensorImpl *self), (self))
  PASS_ON(c10::SymInt, sym_storage_offset, (const c10::TensorImpl *self), (self))
  PASS_ON(void, reset_backward_hooks, (const c10::TensorImpl *self), (self))
#undef PASS_ON

  // The listener first: the tracer before this one may be Python code, and take its time.
#define TRACE(name, parameters, told, passed)                                     \
  void name parameters const override                                             \
  {                                                                               \
    if (device_type == c10::kCUDA) {                                              \
      tell told;                                                                  \
    }                                                                             \
    if (const PyInterpreter *before = previous.load(std::memory_order_acquire)) { \
      (*before)->name passed;                                                     \
    }                                                                             \
  }
  using Type = c10::DeviceType;
  void trace_gpu_event_creation(Type device_type, uintptr_t event) const override
  {
    if (const PyInterpreter *before = previous.load(std::memory_order_acquire)) {
      (*before)->trace_gpu_event_creation(device_type, event);
    }
  }
  void trace_gpu_stream_creation(Type device_type, uintptr_t stream) const override
  {
    if (const PyInterpreter *before = previous.load(std::memory_order_acquire)) {
      (*before)->trace_gpu_stream_creation(device_type, stream);
    }
  }
  TRACE(trace_gpu_event_deletion, (Type device_type, uintptr_t event),
        (&GpuTraceListener::event_destroyed, event), (device_type, event))
  TRACE(trace_gpu_event_record, (Type device_type, uintptr_t event, uintptr_t stream),
        (&GpuTraceListener::event_recorded, event, stream), (device_type, event, stream))
  TRACE(trace_gpu_event_wait, (Type device_type, uintptr_t event, uintptr_t stream),
        (&GpuTraceListener::event_waited_for, event, stream), (device_type, event, stream))
  TRACE(trace_gpu_memory_allocation, (Type device_type, uintptr_t ptr),
        (&GpuTraceListener::memory_allocated, ptr), (device_type, ptr))
  TRACE(trace_gpu_memory_deallocation, (Type device_type, uintptr_t ptr),
        (&GpuTraceListener::memory_freed, ptr), (device_type, ptr))
  TRACE(trace_gpu_device_synchronization, (Type device_type),
        (&GpuTraceListener::device_synchronized), (device_type))
  TRACE(trace_gpu_stream_synchronization, (Type device_type, uintptr_t stream),
        (&GpuTraceListener::stream_synchronized, stream), (device_type, stream))
  TRACE(trace_gpu_event_synchronization, (Type device_type, uintptr_t event),
        (&GpuTraceListener::event_synchronized, event), (device_type, event))
#undef TRACE
};

// Threads may be calling it when it is taken away, so it lives as long as the process.
const PyInterpreter *tracer()
{
  static const auto *table = new Tracer();
  static const auto *made = new PyInterpreter(table);
  return made;
}

} // namespace

void listen_to_gpu_trace(const GpuTraceListener *listener)
{
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  listener_now.store(listener, std::memory_order_release);
  const PyInterpreter *now = GPUTrace::haveState ? GPUTrace::gpuTraceState.load() : nullptr;
  if (listener != nullptr && now != tracer()) {
    previous.store(now);
    GPUTrace::gpuTraceState.store(tracer());
    GPUTrace::haveState = true;
  } else if (listener == nullptr && now == tracer()) {
    GPUTrace::gpuTraceState.store(previous.load());
  }
}

} // namespace esper
