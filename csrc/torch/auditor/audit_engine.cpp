#include "audit_engine.h"

#include <c10/cuda/CUDAFunctions.h>

namespace esper::auditing
{

const esper_audit_capi *functions = nullptr;
std::atomic<bool> running{false};

namespace
{

Auditor *the_auditor = new Auditor(); // never destroyed: operators may run until the very end

std::atomic<PyObject *> notify{nullptr};
std::atomic<bool> notify_is_due{false};

int tell_python(void * /*unused*/)
{
  notify_is_due.store(false);
  PyObject *function = notify.load();
  if (function == nullptr) {
    return 0;
  }
  Py_INCREF(function);
  PyObject *result = PyObject_CallNoArgs(function);
  Py_DECREF(function);
  Py_XDECREF(result);
  return result == nullptr ? -1 : 0;
}

} // namespace

Auditor &auditor()
{
  return *the_auditor;
}

void end_in_child()
{
  running.store(false);
  the_auditor = new Auditor();
}

void set_notify(PyObject *function)
{
  Py_XDECREF(notify.exchange(Py_XNewRef(function)));
}

void detail::tell_python_soon()
{
  if (notify.load() != nullptr && !notify_is_due.exchange(true)) {
    if (Py_AddPendingCall(tell_python, nullptr) != 0) {
      notify_is_due.store(false); // its queue is full: what is found next tries again
    }
  }
}

audit_stream name_of(uintptr_t handle)
{
  return {c10::cuda::current_device(), handle};
}

} // namespace esper::auditing
