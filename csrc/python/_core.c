/* _core.c: the CPython module esper_alloc._core, with the core and its drivers, without PyTorch. It
 * is also the library that extensions and CUDAPluggableAllocator load: it exports the functions
 * esper_alloc_*. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../black_box/recorder.h"
#include "../device/cuda/cuda.h"
#include "../instance.h"
#include "audit_capi.h"
#include "black_box.h"
#include "capi.h"
#include "frames.h"
#include "gil.h"
#include "replay.h"
#include "report.h"

#ifndef ESPER_VERSION
#error "ESPER_VERSION is set by setup.py"
#endif

/* ---- small helpers ----------------------------------------------------- */

/* Steals `value`; NULL means that an earlier call failed. */
static int dict_take(PyObject *dict, const char *key, PyObject *value)
{
  int failed = !value || PyDict_SetItemString(dict, key, value) < 0;
  Py_XDECREF(value);
  return failed ? -1 : 0;
}

static PyObject *string_or_none(const char *string)
{
  if (!string)
    Py_RETURN_NONE;
  return PyUnicode_DecodeUTF8(string, (Py_ssize_t)strlen(string), "replace");
}

static PyObject *raise_words(esper_status status, const char *words)
{
  PyObject *type = status == ESPER_HOST_MEMORY ? PyExc_MemoryError
                   : status == ESPER_INVALID   ? PyExc_ValueError
                                               : PyExc_RuntimeError;
  PyErr_SetString(type, words);
  return NULL;
}

static PyObject *raise_status(esper_status status)
{
  return raise_words(status, esper_last_error());
}

/* The core of the process, or NULL with an exception. Making it initialises CUDA, which takes a
 * while. */
static esper_core *core_or_raise(void)
{
  esper_core *core;
  Py_BEGIN_ALLOW_THREADS core = esper_instance();
  Py_END_ALLOW_THREADS if (!core) raise_status(ESPER_UNSUPPORTED);
  return core;
}

/* ---- driver_report ----------------------------------------------------- */

static PyObject *report_entry_points(void)
{
  esper_cuda_entry_point entry;
  PyObject *dict = PyDict_New();
  for (int i = 0; dict && esper_cuda_get_entry_point(i, &entry); i++)
    if (dict_take(dict, entry.name, PyBool_FromLong(entry.found)) < 0)
      Py_CLEAR(dict);
  return dict;
}

static PyObject *report_device(int index)
{
  esper_cuda_device device;
  esper_status status;
  Py_BEGIN_ALLOW_THREADS status = esper_cuda_get_device(index, &device);
  Py_END_ALLOW_THREADS if (status != ESPER_OK) return raise_words(status, esper_cuda_last_error());
  return Py_BuildValue("{s:i,s:N,s:n,s:O,s:(ii)}", "index", index, "name",
                       string_or_none(device.name), "total_bytes", (Py_ssize_t)device.total_bytes,
                       "virtual_memory", device.virtual_memory ? Py_True : Py_False,
                       "compute_capability", device.compute_capability[0],
                       device.compute_capability[1]);
}

static PyObject *report_devices(const esper_driver *driver)
{
  int count = 0;
  if (driver)
    driver->device_count(driver->self, &count);
  PyObject *list = PyList_New(count);
  for (int i = 0; list && i < count; i++) {
    PyObject *device = report_device(i);
    if (!device)
      Py_CLEAR(list);
    else
      PyList_SET_ITEM(list, i, device);
  }
  return list;
}

PyDoc_STRVAR(driver_report_doc,
             "driver_report()\n--\n\n"
             "Loads and initialises the CUDA driver, without starting a device, and returns\n"
             "what was found as a dict. Whatever is missing is reported there, not raised.");

static PyObject *driver_report(PyObject *self, PyObject *ignored)
{
  (void)self, (void)ignored;
  const esper_driver *driver = NULL;
  esper_status status;
  Py_BEGIN_ALLOW_THREADS status = esper_cuda_driver(&driver);
  Py_END_ALLOW_THREADS const char *error = status == ESPER_OK ? NULL : esper_last_error();
  int version = esper_cuda_driver_version();
  PyObject *report = PyDict_New();
  if (!report)
    return NULL;
  if (dict_take(report, "available", PyBool_FromLong(status == ESPER_OK)) < 0 ||
      dict_take(report, "error", string_or_none(error)) < 0 ||
      dict_take(report, "library", string_or_none(esper_cuda_library())) < 0 ||
      dict_take(report, "driver_version",
                version ? PyLong_FromLong(version) : string_or_none(NULL)) < 0 ||
      dict_take(report, "entry_points", report_entry_points()) < 0 ||
      dict_take(report, "devices", report_devices(driver)) < 0)
    Py_CLEAR(report);
  return report;
}

/* ---- build_info -------------------------------------------------------- */

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

#ifdef NDEBUG
#define ASSERTS 0
#else
#define ASSERTS 1
#endif

#ifdef ESPER_RULE_SWITCHES
#define RULE_SWITCHES 1
#else
#define RULE_SWITCHES 0
#endif

#ifndef ESPER_BUILD_SANITIZE
#define ESPER_BUILD_SANITIZE NULL
#endif

#ifndef ESPER_BUILD_CUDA_HEADERS
#define ESPER_BUILD_CUDA_HEADERS NULL
#endif

PyDoc_STRVAR(build_info_doc, "build_info()\n--\n\n"
                             "How this module was built, as a dict.");

static PyObject *build_info(PyObject *self, PyObject *ignored)
{
  (void)self, (void)ignored;
  return Py_BuildValue("{s:s,s:s,s:z,s:N,s:N,s:N,s:I}", "version", ESPER_VERSION, "compiler",
                       COMPILER, "cuda_headers", ESPER_BUILD_CUDA_HEADERS, "asserts",
                       PyBool_FromLong(ASSERTS), "rule_switches", PyBool_FromLong(RULE_SWITCHES),
                       "sanitize", string_or_none(ESPER_BUILD_SANITIZE), "capi_version",
                       ESPER_CAPI_VERSION);
}

/* ---- the core of this process ------------------------------------------ */

static const struct esper_capi capi = {.version = ESPER_CAPI_VERSION,
                                       .size = sizeof(struct esper_capi),
                                       .instance = esper_instance,
#define MEMBER(name) .name = esper_##name,
                                       ESPER_CAPI_FUNCTIONS(MEMBER)
#undef MEMBER
};

static const struct esper_audit_capi audit_capi = {.size = sizeof(struct esper_audit_capi),
#define AUDIT_MEMBER(name) .name = audit_##name,
                                                   ESPER_AUDIT_FUNCTIONS(AUDIT_MEMBER)
#undef AUDIT_MEMBER
};

PyDoc_STRVAR(addresses_doc,
             "addresses()\n--\n\n"
             "The addresses of the exported esper_alloc_* functions, by name, for the setters\n"
             "of torch.cuda.memory.CUDAPluggableAllocator.");

static PyObject *addresses(PyObject *self, PyObject *ignored)
{
  (void)self, (void)ignored;
  static const struct {
    const char *name;
    void (*function)(void);
  } exported[] = {
#define EXPORTED(name) {"esper_alloc_" #name, (void (*)(void))esper_alloc_##name}
      EXPORTED(malloc),
      EXPORTED(free),
      EXPORTED(record_use),
      EXPORTED(record_stream),
      EXPORTED(init),
      EXPORTED(reset),
      EXPORTED(set_memory_fraction),
      EXPORTED(base),
      EXPORTED(set_record_stream_visible),
#undef EXPORTED
  };
  PyObject *dict = PyDict_New();
  for (size_t i = 0; dict && i < sizeof exported / sizeof *exported; i++)
    if (dict_take(dict, exported[i].name,
                  PyLong_FromUnsignedLongLong((uintptr_t)exported[i].function)) < 0)
      Py_CLEAR(dict);
  return dict;
}

/* F(name) for each figure of struct esper_counters, in its order */
#define COUNTERS(F)    \
  F(held_back)         \
  F(held_back_us)      \
  F(held_back_in_vain) \
  F(allowance)         \
  F(loans)             \
  F(uses_pending)      \
  F(bytes_pending)     \
  F(blocks_held)       \
  F(events_alive)      \
  F(events_created)    \
  F(metadata_bytes)    \
  F(captured_uses)     \
  F(captured_frees)    \
  F(pages_moved)       \
  F(marks_exact)       \
  F(marks_until_free)  \
  F(bytes_asleep)      \
  F(bytes_asleep_peak)

#define COUNTER(name) +1
_Static_assert(sizeof(esper_counters) == (0 COUNTERS(COUNTER)) * sizeof(uint64_t),
               "a counter is missing above");
#undef COUNTER

PyDoc_STRVAR(counters_doc,
             "counters(device, /)\n--\n\n"
             "The counters of this process's allocator on a device, as a dict. struct\n"
             "esper_counters in esper_report.h describes them. RuntimeError: there is no CUDA.");

static PyObject *counters(PyObject *self, PyObject *argument)
{
  (void)self;
  long device = PyLong_AsLong(argument);
  if (device == -1 && PyErr_Occurred())
    return NULL;
  esper_core *core = core_or_raise();
  if (!core)
    return NULL;
  if (device < 0 || device >= esper_device_count(core))
    return PyErr_Format(PyExc_ValueError, "there is no device %ld: this process has %d", device,
                        esper_device_count(core));
  esper_counters figures;
  esper_status status;
  Py_BEGIN_ALLOW_THREADS status = esper_get_counters(core, (int)device, &figures);
  Py_END_ALLOW_THREADS if (status != ESPER_OK) return raise_status(status);
  PyObject *dict = PyDict_New();
  int failed = !dict;
#define COUNTER(name) \
  failed = failed || dict_take(dict, #name, PyLong_FromUnsignedLongLong(figures.name)) < 0;
  COUNTERS(COUNTER)
#undef COUNTER
  if (failed)
    Py_CLEAR(dict);
  return dict;
}

/* The names of these figures, in their order. */
static PyObject *counter_names(void)
{
#define COUNTER(name) #name,
  static const char *const names[] = {COUNTERS(COUNTER)};
#undef COUNTER
  Py_ssize_t count = (Py_ssize_t)(sizeof names / sizeof *names);
  PyObject *tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple && i < count; i++) {
    PyObject *name = PyUnicode_FromString(names[i]);
    if (name)
      PyTuple_SET_ITEM(tuple, i, name);
    else
      Py_CLEAR(tuple);
  }
  return tuple;
}

PyDoc_STRVAR(
    memory_info_doc,
    "memory_info(device, /)\n--\n\n"
    "(free, total) bytes of a device that this process uses, as the driver has them; in a\n"
    "capture as well. RuntimeError: there is no CUDA.");

static PyObject *memory_info(PyObject *self, PyObject *argument)
{
  (void)self;
  int device = (int)PyLong_AsLong(argument);
  esper_core *core = PyErr_Occurred() ? NULL : core_or_raise();
  if (!core)
    return NULL;
  size_t free_bytes, total;
  esper_status status;
  Py_BEGIN_ALLOW_THREADS status = esper_memory_info(core, device, &free_bytes, &total);
  Py_END_ALLOW_THREADS if (status != ESPER_OK) return raise_status(status);
  return Py_BuildValue("nn", (Py_ssize_t)free_bytes, (Py_ssize_t)total);
}

PyDoc_STRVAR(driver_calls_doc,
             "driver_calls()\n--\n\n"
             "How often this process's allocator has called each function of the CUDA driver\n"
             "layer, as a dict. RuntimeError: there is no CUDA.");

static PyObject *driver_calls(PyObject *self, PyObject *ignored)
{
  (void)self, (void)ignored;
  esper_core *core = core_or_raise();
  const char *name;
  PyObject *dict = core ? PyDict_New() : NULL;
  for (int i = 0; dict && (name = esper_driver_call_name(i)); i++)
    if (dict_take(dict, name, PyLong_FromUnsignedLongLong(esper_driver_calls(core, i))) < 0)
      Py_CLEAR(dict);
  return dict;
}

/* ---- the module -------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"driver_report", driver_report, METH_NOARGS, driver_report_doc},
    {"build_info", build_info, METH_NOARGS, build_info_doc},
    {"addresses", addresses, METH_NOARGS, addresses_doc},
    {"counters", counters, METH_O, counters_doc},
    {"memory_info", memory_info, METH_O, memory_info_doc},
    {"pending", esper_py_pending, METH_O, esper_py_pending_doc},
    {"driver_calls", driver_calls, METH_NOARGS, driver_calls_doc},
    {"replay", (PyCFunction)(void (*)(void))esper_py_replay, METH_VARARGS | METH_KEYWORDS,
     esper_py_replay_doc},
    {0},
};

static int module_exec(PyObject *module)
{
  PyObject *capsule = PyCapsule_New((void *)&capi, ESPER_CAPI_NAME, NULL);
  int failed = !capsule || PyModule_AddObjectRef(module, "capi", capsule) < 0 ||
               PyModule_AddStringConstant(module, "__version__", ESPER_VERSION) < 0;
  PyObject *names = failed ? NULL : counter_names();
  failed = failed || !names || PyModule_AddObjectRef(module, "COUNTERS", names) < 0;
  Py_XDECREF(names);
  Py_XDECREF(capsule);
  capsule = failed ? NULL : PyCapsule_New((void *)&audit_capi, ESPER_AUDIT_CAPI_NAME, NULL);
  failed = !capsule || PyModule_AddObjectRef(module, "audit", capsule) < 0;
  Py_XDECREF(capsule);
  box_find_sites(esper_py_site);
  esper_instance_waits(esper_py_while_waiting);
  return failed || PyModule_AddFunctions(module, esper_py_black_box_methods) < 0 ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0},
};

PyDoc_STRVAR(module_doc, "The allocator's core and its drivers, without PyTorch.");

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "esper_alloc._core", .m_doc = module_doc, .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void)
{
  return PyModuleDef_Init(&module);
}
