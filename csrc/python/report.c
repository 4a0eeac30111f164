#include "report.h"

#include "../esper_alloc.h"
#include "../instance.h"

/* The core and the number of a device, or NULL with an exception. */
static esper_core *core_with_device(PyObject *argument, int *device)
{
  long index = PyLong_AsLong(argument);
  if (index == -1 && PyErr_Occurred())
    return NULL;
  esper_core *core;
  Py_BEGIN_ALLOW_THREADS core = esper_instance();
  Py_END_ALLOW_THREADS if (!core)
  {
    PyErr_SetString(PyExc_RuntimeError, esper_last_error());
  }
  else if (index < 0 || index >= esper_device_count(core))
  {
    PyErr_Format(PyExc_ValueError, "there is no device %ld: this process has %d", index,
                 esper_device_count(core));
    core = NULL;
  }
  *device = (int)index;
  return core;
}

static PyObject *raise_last_error(esper_status status)
{
  PyErr_SetString(status == ESPER_HOST_MEMORY ? PyExc_MemoryError : PyExc_RuntimeError,
                  esper_last_error());
  return NULL;
}

static PyObject *address_of(const void *handle)
{
  return PyLong_FromUnsignedLongLong((uintptr_t)handle);
}

/* Appends and steals `value`; NULL means that an earlier call failed. */
static int list_take(PyObject *list, PyObject *value)
{
  int failed = !value || PyList_Append(list, value) < 0;
  Py_XDECREF(value);
  return failed ? -1 : 0;
}

const char esper_py_pending_doc[] =
    "pending(device, /)\n--\n\n"
    "The blocks that owe uses, as dicts: address, size, live, stream (a handle) and\n"
    "uses, a list of dicts: stream_device, stream, number, until_free, held.\n"
    "RuntimeError: there is no CUDA.";

static PyObject *use_dict(const esper_use_entry *use)
{
#define KIND(flag) (use->kind & (flag) ? Py_True : Py_False)
  return Py_BuildValue("{s:i,s:N,s:K,s:O,s:O}", "stream_device", use->device, "stream",
                       address_of(use->stream), "number", (unsigned long long)use->number,
                       "until_free", KIND(ESPER_ENTRY_AT_FREE), "held", KIND(ESPER_ENTRY_HELD));
#undef KIND
}

static PyObject *block_dict(const esper_block_entry *block, const esper_use_entry *uses)
{
  PyObject *list = PyList_New(0);
  for (unsigned i = 0; list && i < block->uses; i++)
    if (list_take(list, use_dict(&uses[i])) < 0)
      Py_CLEAR(list);
  if (!list)
    return NULL;
  return Py_BuildValue("{s:K,s:K,s:O,s:N,s:N}", "address", (unsigned long long)block->address,
                       "size", (unsigned long long)block->size, "live",
                       block->state == ESPER_BLOCK_ALLOCATED ? Py_True : Py_False, "stream",
                       address_of(block->stream), "uses", list);
}

PyObject *esper_py_pending(PyObject *module, PyObject *argument)
{
  (void)module;
  int device;
  esper_core *core = core_with_device(argument, &device);
  if (!core)
    return NULL;
  esper_snapshot picture;
  esper_status status;
  Py_BEGIN_ALLOW_THREADS status = esper_snapshot_take(core, device, &picture);
  Py_END_ALLOW_THREADS if (status != ESPER_OK) return raise_last_error(status);
  PyObject *list = PyList_New(0);
  for (size_t i = 0; list && i < picture.block_count; i++) {
    const esper_block_entry *block = &picture.blocks[i];
    if (block->uses && list_take(list, block_dict(block, picture.uses + block->first_use)) < 0)
      Py_CLEAR(list);
  }
  esper_snapshot_free(&picture);
  return list;
}
