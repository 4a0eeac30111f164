/* pickle_check.c: returns a pickle's cost as a number, or raises what is wrong with it. */
#define PY_SSIZE_T_CLEAN
#include "pickle_check.h"

#include "../pickle/check.h"
#include "../pickle/limits.h"

const char esper_py_check_pickle_doc[] =
    "check_pickle(data, limit=2**64 - 1, /) -> int\n--\n\n"
    "Makes sure that `data` starts with a complete pickle of plain containers and\n"
    "scalars, nested at most 100 deep, without loading it. Returns about how many\n"
    "bytes of memory loading it would take, and stops early if these are more than\n"
    "`limit`. Raises ValueError, which names the byte that is wrong, and why.";

/* What to do about a file whose structure is refused. */
#define REMEDY "write the snapshot again with torch.cuda.memory._dump_snapshot()"

/* Raises ValueError for a refused pickle. `marked`: it begins as those of protocol 2 and later do,
 * and snapshots always. A file that does not is probably no pickle rather than a hostile one. */
static PyObject *verdict_raise(const pickle_verdict *v, int marked)
{
  PyObject *error = PyExc_ValueError;
  switch (v->found) {
  case PICKLE_TRUNCATED:
    if (marked)
      return PyErr_Format(error, "truncated: it ends at byte %zu, before its pickle does", v->at);
    break;
  case PICKLE_TOO_DEEP:
    return PyErr_Format(error,
                        "refused: byte %zu nests containers more than %d deep, and PyTorch's "
                        "snapshots need fewer than 20; " REMEDY,
                        v->at, PICKLE_DEPTH_LIMIT);
  case PICKLE_CIRCULAR:
    return PyErr_Format(error,
                        "refused: byte %zu changes a container that already is part of another, "
                        "or of itself; " REMEDY,
                        v->at);
  case PICKLE_HUGE_KEY:
    return PyErr_Format(error,
                        "refused: byte %zu uses a tuple with more than %d values as a key; " REMEDY,
                        v->at, PICKLE_KEY_LIMIT);
  case PICKLE_NOT_PLAIN:
    if (marked)
      return PyErr_Format(error,
                          "refused: byte %zu %s; a memory snapshot contains only plain "
                          "containers and scalars",
                          v->at, v->why);
    break;
  default: break;
  }
  if (!marked)
    return PyErr_Format(error, "not a memory snapshot: the file is not a pickle");
  return PyErr_Format(error, "not a memory snapshot: byte %zu %s", v->at, v->why);
}

PyObject *esper_py_check_pickle(PyObject *self, PyObject *args)
{
  (void)self;
  Py_buffer view;
  unsigned long long limit = UINT64_MAX;
  if (!PyArg_ParseTuple(args, "y*|K:check_pickle", &view, &limit))
    return NULL;
  pickle_verdict v;
  Py_BEGIN_ALLOW_THREADS;
  v = pickle_check(view.buf, (size_t)view.len, limit);
  Py_END_ALLOW_THREADS;
  int marked = view.len > 0 && *(const unsigned char *)view.buf == 0x80;
  PyBuffer_Release(&view);

  switch (v.found) {
  case PICKLE_PLAIN:
  case PICKLE_COSTLY: return PyLong_FromUnsignedLongLong(v.cost);
  case PICKLE_NO_MEMORY: return PyErr_NoMemory();
  default: return verdict_raise(&v, marked);
  }
}
