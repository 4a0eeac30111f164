#include "auditor.h"

#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>

#include <pthread.h>

#include "../base/core_api.h"
#include "../base/python_objects.h"
#include "../debugging/fence.h"
#include "../debugging/sites.h"
#include "audit_engine.h"
#include "audit_findings.h"
#include "audit_operators.h"
#include "audit_order.h"

namespace esper::auditing
{

namespace
{

uint64_t number_of(PyObject *object)
{
  const unsigned long long number = PyLong_AsUnsignedLongLong(object);
  if (PyErr_Occurred() != nullptr) {
    throw python_error();
  }
  return number;
}

// The first operator that a thread runs after the audit began takes a lock of PyTorch's. In a child
// it may stay locked for ever, so the thread that forks takes and releases it before.
void fork_begins()
{
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

// A forked child is not audited.
void child_begins()
{
  end_in_child();
  set_watcher(Watcher::FENCE, false);
}

} // namespace

void set_audit_capi(const esper_audit_capi *table)
{
  functions = table;
}

PyObject *audit_start(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3 && PyList_Check(args[0]),
                   "audit_start() takes a list, a function and a flag");
  TORCH_CHECK(!running.load(), "an audit is running in this process already: end it first");
  std::vector<std::string> folders;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    const char *folder = PyUnicode_AsUTF8(PyList_GET_ITEM(args[0], i));
    if (folder == nullptr) {
      throw python_error();
    }
    folders.emplace_back(folder);
  }
  static const int in_child = pthread_atfork(fork_begins, nullptr, child_begins);
  TORCH_CHECK(in_child == 0, "no host memory for an audit");
  audit *engine = functions->create();
  TORCH_CHECK(engine != nullptr, "no host memory for an audit");
  sites::set_foreign_folders(std::move(folders));
  {
    Auditor &a = auditor();
    std::lock_guard<std::mutex> lock(a.mutex);
    functions->destroy(a.engine);
    a.engine = engine;
    a.told = 0;
    a.shapes = {};
    a.found_tensors.clear();
    a.views.clear();
    a.gradients.clear();
  }
  if (args[2] == Py_True) {
    fence::turn_on();
  }
  set_notify(args[1] == Py_None ? nullptr : args[1]);
  running.store(true, std::memory_order_release);
  observe_operators();
  watch_order();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_stop(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  if (!running.load()) {
    Py_RETURN_NONE;
  }
  fence::turn_off();
  stop_watching_order();
  stop_observing();
  set_notify(nullptr);
  Auditor &a = auditor();
  std::lock_guard<std::mutex> lock(a.mutex);
  running.store(false);
  functions->judge_rest(a.engine);
  keep_tensors(a);
  a.views.clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_findings(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  return describe_findings();
  END_HANDLE_TH_ERRORS
}

PyObject *audit_state(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  // Making Python objects may collect garbage and free tensors, so the lock is not held for that.
  bool is_complete = true;
  size_t found = 0;
  size_t bytes = 0;
  Auditor &a = auditor();
  {
    std::lock_guard<std::mutex> lock(a.mutex);
    if (a.engine != nullptr) {
      is_complete = functions->is_complete(a.engine) != 0;
      found = functions->finding_count(a.engine);
      bytes = functions->memory(a.engine);
    }
  }
  return Py_BuildValue("(OOnn)", running.load() ? Py_True : Py_False,
                       is_complete ? Py_True : Py_False, static_cast<Py_ssize_t>(found),
                       static_cast<Py_ssize_t>(bytes));
  END_HANDLE_TH_ERRORS
}

PyObject *audit_freed(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "audit_freed() takes 2 arguments");
  return describe_last_freed(number_of(args[0]), args[1] == Py_True);
  END_HANDLE_TH_ERRORS
}

PyObject *audit_freed_at(PyObject * /*module*/, PyObject *address)
{
  HANDLE_TH_ERRORS
  const auto freed = fence::freed_at(number_of(address));
  if (!freed) {
    Py_RETURN_NONE;
  }
  return describe_freed(*freed);
  END_HANDLE_TH_ERRORS
}

PyObject *audit_fence_rounds(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  esper_core *made = core_if_made();
  return PyLong_FromUnsignedLongLong(made != nullptr ? capi().fence_rounds(made) : 0);
  END_HANDLE_TH_ERRORS
}

PyObject *audit_known(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "audit_known() takes 4 arguments");
  const uint64_t address = number_of(args[0]);
  const uint64_t size = number_of(args[1]);
  const audit_stream stream = {static_cast<int>(number_of(args[2])), number_of(args[3])};
  tell_order([&](audit *engine) { functions->allocated(engine, address, size, &stream, 0); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_all_done(PyObject * /*module*/, PyObject *devices)
{
  HANDLE_TH_ERRORS
  const uint64_t count = number_of(devices);
  tell_order([&](audit *engine) {
    for (uint64_t device = 0; device < count; ++device) {
      functions->device_synchronized(engine, static_cast<int>(device));
    }
  });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_waited(PyObject * /*module*/, PyObject *event)
{
  HANDLE_TH_ERRORS
  const uint64_t handle = number_of(event);
  tell_order([&](audit *engine) { functions->event_synchronized(engine, handle); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_waited_stream(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "audit_waited_stream() takes 2 arguments");
  const audit_stream stream = {static_cast<int>(number_of(args[0])), number_of(args[1])};
  tell_order([&](audit *engine) { functions->stream_synchronized(engine, stream); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_capture_began(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  if (running.load()) {
    observe_views();
  }
  const audit_stream stream = name_of(c10::cuda::getCurrentCUDAStream());
  tell_order([&](audit *engine) { functions->capture_began(engine, stream); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_capture_ended(PyObject * /*module*/, PyObject *graph)
{
  HANDLE_TH_ERRORS
  const uint64_t number = number_of(graph);
  const audit_stream stream = name_of(c10::cuda::getCurrentCUDAStream());
  tell_order([&](audit *engine) { functions->capture_ended(engine, stream, number); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_replayed(PyObject * /*module*/, PyObject *graph)
{
  HANDLE_TH_ERRORS
  const uint64_t number = number_of(graph);
  const audit_stream stream = name_of(c10::cuda::getCurrentCUDAStream());
  const audit_place place = {site_now(), operation_number("CUDAGraph.replay"), 0};
  tell_order([&](audit *engine) { functions->replayed(engine, number, stream, place); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_graph_gone(PyObject * /*module*/, PyObject *graph)
{
  HANDLE_TH_ERRORS
  const uint64_t number = number_of(graph);
  tell_order([&](audit *engine) { functions->graph_destroyed(engine, number); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *audit_leave_to_pytorch(PyObject * /*module*/, PyObject *on)
{
  leave_to_pytorch(on == Py_True);
  Py_RETURN_NONE;
}

PyObject *audit_launch(PyObject * /*module*/, PyObject *values)
{
  HANDLE_TH_ERRORS
  if (running.load(std::memory_order_acquire)) {
    AllSeen all;
    each_tensor(values, [&](const c10::TensorImpl &tensor) {
      each_access(tensor, [&](const Access &access) { add_seen(all, access, false); });
    });
    tell_accesses(all, operation_number("a compiled kernel"));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace esper::auditing
