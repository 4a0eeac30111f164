/* replay.h: the Python function that runs a recorded history through a new core. */
#ifndef ESPER_REPLAY_H
#define ESPER_REPLAY_H

#include <Python.h>

extern const char esper_py_replay_doc[];
PyObject *esper_py_replay(PyObject *self, PyObject *args, PyObject *kwargs);

#endif
