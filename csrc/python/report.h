/* report.h: what freed memory still waits for, as Python objects. */
#ifndef ESPER_PYTHON_REPORT_H
#define ESPER_PYTHON_REPORT_H

#include <Python.h>

PyObject *esper_py_pending(PyObject *module, PyObject *device);
extern const char esper_py_pending_doc[];

#endif
