/* replay.h: runs a recorded history through a fresh core. */
#ifndef ESPER_REPLAY_H
#define ESPER_REPLAY_H

#include <Python.h>

extern const char esper_py_replay_doc[];
PyObject *esper_py_replay(PyObject *self, PyObject *args, PyObject *kwargs);

#endif
