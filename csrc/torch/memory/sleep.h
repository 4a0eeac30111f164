// Tags, sleep and wake, for esper_alloc/torch_allocator/sleep.py.
#pragma once

#include <Python.h>

namespace esper
{

// push_tag(name), pop_tag(): of the calling thread.
PyObject *push_tag(PyObject *module, PyObject *name);
PyObject *pop_tag(PyObject *module, PyObject *none);

// sleep(tags, keep_host, device) -> (given back, kept, ((bytes that stay, why), ...)). tags: a
// tuple of str, or None. device: -1 is all devices.
PyObject *put_to_sleep(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
// wake(tags, device) -> bytes.
PyObject *wake_up(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
// trim_sleep(): gives back the host memory that is kept for the next sleep.
PyObject *trim_sleep(PyObject *module, PyObject *none);
// tag_stats(device) -> a list of dicts with the members of esper_tag_stats.
PyObject *tag_stats(PyObject *module, PyObject *device);

// pool_asleep((first, second)) -> bytes of that pool that sleep.
PyObject *pool_asleep(PyObject *module, PyObject *id);

} // namespace esper
