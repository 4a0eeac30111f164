/* gil.h: whether the calling thread has the GIL, and how it waits without. For C and C++. */
#ifndef ESPER_PYTHON_GIL_H
#define ESPER_PYTHON_GIL_H

#include <Python.h>

/* Whether there is an interpreter, and it is not finalizing. */
static inline int esper_py_is_there(void)
{
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

/* Python must be there. PyGILState_Check() would answer yes for ever once the process has made a
 * subinterpreter. */
static inline int esper_py_holds_gil(void)
{
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked() != NULL;
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet() != NULL; /* the calling thread's */
#else
  const PyThreadState *running = _PyThreadState_UncheckedGet(); /* of whoever holds the GIL */
  return running != NULL && running == PyGILState_GetThisThreadState();
#endif
}

/* Waits without the GIL if the caller holds it. See esper_config.while_waiting. */
static inline void esper_py_while_waiting(void (*wait)(void *argument), void *argument)
{
  PyThreadState *state = esper_py_is_there() && esper_py_holds_gil() ? PyEval_SaveThread() : NULL;
  wait(argument);
  if (state)
    PyEval_RestoreThread(state);
}

#endif
