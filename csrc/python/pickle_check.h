/* pickle_check.h: the Python function that checks that a pickle has nothing but plain data. */
#ifndef ESPER_PY_PICKLE_CHECK_H
#define ESPER_PY_PICKLE_CHECK_H

#include <Python.h>

extern const char esper_py_check_pickle_doc[];
PyObject *esper_py_check_pickle(PyObject *self, PyObject *args);

#endif
