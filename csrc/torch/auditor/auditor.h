// The auditor's observation: tells the happens-before engine (csrc/audit/audit.h) what a program
// does, whichever allocator it uses, and hands its findings to Python.
//
// Accesses are the tensors of operators (operator_memory.h, operations.h); events, waits,
// synchronisation, allocations and frees come from PyTorch's tracer (gpu_trace.h), marks from
// mark_watch.h and from the operator record_stream. CUDA graphs and queries are told by
// esper_alloc/auditor/observation.py.
#pragma once

#include <torch/csrc/python_headers.h>

#include "../../python/audit_capi.h"

namespace esper::auditing
{

// Called once, when the Python module is imported.
void set_audit_capi(const esper_audit_capi *table);

// Python functions.
//
// audit_start(folders, notify, fence): begins an audit. Files in `folders` are not the user's.
// `notify` is called without arguments in the main thread, soon after something new was found, and
// may raise; None: nobody is told. `fence`: see fence.h. RuntimeError: an audit is running, or a
// device cannot have fences.
PyObject *audit_start(PyObject *module, PyObject *const *args, Py_ssize_t count);
// audit_stop(): judges what is left, and ends the audit. audit_findings() still works.
PyObject *audit_stop(PyObject *module, PyObject *none);
// audit_findings() -> list of dicts, of the last audit.
PyObject *audit_findings(PyObject *module, PyObject *none);
// audit_state() -> (running, complete, findings, bytes of host memory).
PyObject *audit_state(PyObject *module, PyObject *none);

// audit_freed(most, only_in_use) -> list of dicts: what was freed last behind a fence, the latest
// first; or only what was in use then.
// audit_freed_at(address) -> dict: what was freed there, or None. audit_fence_rounds() -> how often
// the addresses of fences have come round.
PyObject *audit_freed(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *audit_freed_at(PyObject *module, PyObject *address);
PyObject *audit_fence_rounds(PyObject *module, PyObject *none);

// audit_known(address, size, device, stream): a block that is live already.
PyObject *audit_known(PyObject *module, PyObject *const *args, Py_ssize_t count);
// audit_all_done(devices): everything so far is over on that many devices.
PyObject *audit_all_done(PyObject *module, PyObject *devices);
// audit_waited(event): a query said that the event, a handle, is over. audit_waited_stream(device,
// handle): the same of all work of a stream.
PyObject *audit_waited(PyObject *module, PyObject *event);
PyObject *audit_waited_stream(PyObject *module, PyObject *const *args, Py_ssize_t count);

// Graphs, known by a number that is not 0, on the current stream.
PyObject *audit_capture_began(PyObject *module, PyObject *none);
PyObject *audit_capture_ended(PyObject *module, PyObject *graph); // 0: it failed
PyObject *audit_replayed(PyObject *module, PyObject *graph);
PyObject *audit_graph_gone(PyObject *module, PyObject *graph);
// audit_leave_to_pytorch(on): around methods of graphs, which write the state of random number
// generators on whichever stream is current.
PyObject *audit_leave_to_pytorch(PyObject *module, PyObject *on);

// audit_launch(values): a kernel beside the operators reads the tensors in a tuple or list,
// nested to any depth.
PyObject *audit_launch(PyObject *module, PyObject *values);

} // namespace esper::auditing
