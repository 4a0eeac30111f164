/* pickle_check.h: whether a pickle holds nothing but plain data. */
#ifndef ESPER_PICKLE_CHECK_H
#define ESPER_PICKLE_CHECK_H

#include <Python.h>

extern const char esper_py_check_pickle_doc[];
PyObject *esper_py_check_pickle(PyObject *self, PyObject *data);

#endif
