// The module esper_alloc._torch, the PyTorch side of esper_alloc, built for one minor version of
// torch. torch must be imported first. esper_alloc/installation/pytorch.py does that, and refuses
// to load this module with another version.
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/version.h>

#include "../torch/base/allocator.h"
#include "../torch/auditor/auditor.h"
#include "../torch/automatic/automatic.h"
#include "../torch/base/core_api.h"
#include "../torch/base/current.h"
#include "../torch/base/python_objects.h"
#include "../torch/debugging/sites.h"
#include "../torch/memory/sleep.h"
#include "../torch/uses/scope.h"
#include "../torch/uses/use.h"
#include "audit_capi.h"
#include "capi.h"

#define ESPER_TEXT_(x) #x
#define ESPER_TEXT(x) ESPER_TEXT_(x)

namespace
{

namespace native = c10::cuda::CUDACachingAllocator;

// A torch._C._cuda_CUDAAllocator. It does not own the allocator, which outlives the interpreter, as
// c10 requires.
PyObject *make_allocator(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  std::shared_ptr<native::CUDAAllocator> shared(&esper::allocator(),
                                                [](native::CUDAAllocator *) {});
  return pybind11::cast(std::move(shared)).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject *is_current(PyObject * /*module*/, PyObject * /*none*/)
{
  return PyBool_FromLong(esper::is_current());
}

PyObject *built_for(PyObject * /*module*/, PyObject * /*none*/)
{
  return PyUnicode_FromString(ESPER_TEXT(TORCH_VERSION_MAJOR) "." ESPER_TEXT(TORCH_VERSION_MINOR));
}

template <class Function>
PyCFunction method(Function *function)
{
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"allocator", make_allocator, METH_NOARGS, "The allocator, as torch._C._cuda_CUDAAllocator."},
    {"is_current", is_current, METH_NOARGS, "Whether PyTorch allocates CUDA memory through it."},
    {"built_for", built_for, METH_NOARGS,
     "The torch version, major.minor, that this module was built for."},
    {"record_use", method(&esper::record_use), METH_FASTCALL | METH_KEYWORDS,
     nullptr}, // esper_alloc/uses/use.py sets its docstring
    {"make_tensor_method", esper::make_tensor_method, METH_O,
     "make_tensor_method(Tensor) -> record_use as a method of that class."},
    {"enter_stream", esper::enter_stream, METH_O,
     "enter_stream(stream) -> state for leave_stream()."},
    {"leave_stream", method(&esper::leave_stream), METH_FASTCALL,
     "leave_stream(tensors, stream, state): mark the tensors and restore the state."},
    {"hand_over", method(&esper::hand_over), METH_FASTCALL,
     "hand_over(tensors, stream): make the current stream wait for `stream` "
     "and protect `tensors` on it."},
    {"announce_capture", method(&esper::announce_capture), METH_FASTCALL,
     "announce_capture(device, begins) -> bool: a capture begins or has ended."},
    {"automatic_uses", esper::automatic_uses, METH_O,
     "automatic_uses(on): turn automatic uses on or off."},
    {"observe_now", esper::observe_now, METH_NOARGS,
     "observe_now(): there is a stream that the allocator cannot notice."},
    {"is_observing", esper::is_observing, METH_NOARGS, "Whether operators note their inputs."},
    {"note_uses", esper::note_uses, METH_O,
     "note_uses(values): note uses of the tensors in a tuple or list on the current streams."},
    {"touch", method(&esper::touch), METH_FASTCALL,
     "touch(tensors, stream): mark uses that last until the free."},
    {"audit_start", method(&esper::auditing::audit_start), METH_FASTCALL,
     "audit_start(folders, notify, fence): begin an audit."},
    {"audit_stop", esper::auditing::audit_stop, METH_NOARGS, "audit_stop(): end the audit."},
    {"audit_findings", esper::auditing::audit_findings, METH_NOARGS, "The findings, as dicts."},
    {"audit_state", esper::auditing::audit_state, METH_NOARGS,
     "(running, complete, number of findings, bytes of host memory)"},
    {"audit_freed", method(&esper::auditing::audit_freed), METH_FASTCALL,
     "audit_freed(most, only_in_use): what was freed last behind a fence, as dicts."},
    {"audit_freed_at", esper::auditing::audit_freed_at, METH_O,
     "audit_freed_at(address): what was freed there behind a fence, or None."},
    {"audit_fence_rounds", esper::auditing::audit_fence_rounds, METH_NOARGS,
     "How often the addresses of fences have come round."},
    {"audit_known", method(&esper::auditing::audit_known), METH_FASTCALL,
     "audit_known(address, size, device, stream): a block that is live already."},
    {"audit_all_done", esper::auditing::audit_all_done, METH_O,
     "audit_all_done(devices): everything so far is over."},
    {"audit_waited", esper::auditing::audit_waited, METH_O,
     "audit_waited(event): the event is over."},
    {"audit_waited_stream", method(&esper::auditing::audit_waited_stream), METH_FASTCALL,
     "audit_waited_stream(device, stream): all work of the stream is over."},
    {"audit_capture_began", esper::auditing::audit_capture_began, METH_NOARGS,
     "audit_capture_began(): the current stream is captured."},
    {"audit_capture_ended", esper::auditing::audit_capture_ended, METH_O,
     "audit_capture_ended(graph): the capture made this graph; 0: it failed."},
    {"audit_replayed", esper::auditing::audit_replayed, METH_O, "audit_replayed(graph)."},
    {"audit_graph_gone", esper::auditing::audit_graph_gone, METH_O, "audit_graph_gone(graph)."},
    {"audit_leave_to_pytorch", esper::auditing::audit_leave_to_pytorch, METH_O,
     "audit_leave_to_pytorch(on): while on, this thread's accesses are not audited; calls nest."},
    {"audit_launch", esper::auditing::audit_launch, METH_O,
     "audit_launch(values): a kernel beside the operators reads these tensors."},
    {"push_tag", esper::push_tag, METH_O,
     "push_tag(name): what this thread allocates has the tag."},
    {"pop_tag", esper::pop_tag, METH_NOARGS, "pop_tag(): takes back the last push_tag()."},
    {"sleep", method(&esper::put_to_sleep), METH_FASTCALL,
     "sleep(tags, keep_host, device) -> (bytes given back, bytes kept, what stays and why)."},
    {"wake", method(&esper::wake_up), METH_FASTCALL, "wake(tags, device) -> bytes."},
    {"trim_sleep", esper::trim_sleep, METH_NOARGS,
     "trim_sleep(): gives back host memory that is kept for the next sleep."},
    {"pool_asleep", esper::pool_asleep, METH_O,
     "pool_asleep((first, second)): bytes of that pool that sleep."},
    {"tag_stats", esper::tag_stats, METH_O, "tag_stats(device) -> a dict for each tag."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "esper_alloc._torch",
                          "The PyTorch side of esper_alloc.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

} // namespace

PyMODINIT_FUNC PyInit__torch()
{
  const esper_capi *table = esper_capi_import();
  if (table == nullptr || !esper::find_torch_classes()) {
    return nullptr;
  }
  // The package's _core is imported by now.
  const auto *audit =
      static_cast<const esper_audit_capi *>(PyCapsule_Import(ESPER_AUDIT_CAPI_NAME, 0));
  if (audit == nullptr) {
    return nullptr;
  }
  if (audit->size != sizeof(esper_audit_capi)) {
    PyErr_SetString(PyExc_ImportError,
                    "esper_alloc._core and esper_alloc._torch are of different builds: rebuild and "
                    "reinstall esper_alloc");
    return nullptr;
  }
  esper::set_capi(table);
  table->alloc_find_nodes(&esper::sites::current_node);
  esper::auditing::set_audit_capi(audit);
  return PyModule_Create(&definition);
}
