/* A malloc has no time to ask CPython for its frames as objects. So this walks the interpreter's
 * own frames, whose layout each minor version of CPython has in its internal headers, and hashes
 * where each is in its code. Names are found once for each hash, by the public functions. */
#define Py_BUILD_CORE 1
#include <Python.h>
#include <frameobject.h>
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe_structs.h>
#elif PY_VERSION_HEX >= 0x030B0000
#include <internal/pycore_frame.h>
#endif
#undef Py_BUILD_CORE

#include "../black_box/sites.h"
#include "frames.h"
#include "gil.h"

enum {
  HASHED = 32, /* innermost frames */
  NAME_BYTES = 8192,
};

/* ---- the interpreter's frames ------------------------------------------------- */

#if PY_VERSION_HEX >= 0x030B0000
typedef struct _PyInterpreterFrame frame_t;

static const frame_t *innermost(const PyThreadState *thread)
{
#if PY_VERSION_HEX >= 0x030D0000
  return thread->current_frame;
#else
  return thread->cframe->current_frame;
#endif
}

static const frame_t *caller_of(const frame_t *frame)
{
  return frame->previous;
}

/* The instruction that it is at: an address in its code object, which stays as long as that. */
static const void *instruction_of(const frame_t *frame)
{
#if PY_VERSION_HEX >= 0x030D0000
  return frame->instr_ptr;
#else
  return frame->prev_instr;
#endif
}
#else
typedef struct _frame frame_t;

static const frame_t *innermost(const PyThreadState *thread)
{
  return thread->frame;
}

static const frame_t *caller_of(const frame_t *frame)
{
  return frame->f_back;
}

static const void *instruction_of(const frame_t *frame)
{
  return (const char *)((uintptr_t)frame->f_code * 31) + frame->f_lasti;
}
#endif

/* A sum of products, none of which waits for the one before. */
static uint64_t hash_here(const PyThreadState *thread)
{
  const uint64_t base = UINT64_C(0x9e3779b97f4a7c15);
  uint64_t hash = 0, power = base;
  const frame_t *frame = innermost(thread);
  for (int i = 0; frame && i < HASHED; i++, frame = caller_of(frame), power *= base)
    hash += (uintptr_t)instruction_of(frame) * power;
  return hash ^ hash >> 32; /* the table takes the lower bits */
}

/* ---- names ------------------------------------------------------------------------ */

static const char *utf8(PyObject *string)
{
  const char *text = string ? PyUnicode_AsUTF8(string) : NULL;
  if (!text)
    PyErr_Clear();
  return text ? text : "?";
}

static PyObject *function_name(const PyCodeObject *code)
{
#if PY_VERSION_HEX >= 0x030B0000
  return code->co_qualname;
#else
  return code->co_name;
#endif
}

/* A line for each frame, and the frames' code objects. Asking for frames may collect garbage and so
 * free tensors. */
static size_t name_here(char *name, PyObject **kept, int *count)
{
  size_t length = 0;
  PyFrameObject *frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int i = 0; frame && i < HASHED && length < NAME_BYTES - 1; i++) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    int written =
        snprintf(name + length, NAME_BYTES - length, "%s%s:%d (%s)", i ? "\n" : "",
                 utf8(code->co_filename), PyFrame_GetLineNumber(frame), utf8(function_name(code)));
    length += written > 0 ? (size_t)written : 0;
    kept[(*count)++] = (PyObject *)code;
    PyFrameObject *back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return length < NAME_BYTES ? length : NAME_BYTES - 1;
}

static __attribute__((noinline)) unsigned add_here(uint64_t hash)
{
  if (sites_are_full())
    return 0;
  char name[NAME_BYTES];
  PyObject *kept[HASHED];
  int count = 0;
  PyObject *type, *value, *traceback;
  PyGILState_STATE state = PyGILState_Ensure();
  PyErr_Fetch(&type, &value, &traceback);
  size_t length = name_here(name, kept, &count);
  unsigned site = site_add(hash, name, length);
  for (int i = 0; !site && i < count; i++)
    Py_DECREF(kept[i]); /* else they stay: their addresses are the hash */
  PyErr_Restore(type, value, traceback);
  PyGILState_Release(state);
  return site;
}

unsigned esper_py_site(void)
{
  if (!esper_py_is_there()) /* threads' states are being freed */
    return 0;
  const PyThreadState *thread = PyGILState_GetThisThreadState();
  uint64_t hash = thread ? hash_here(thread) : 0;
  if (!hash)
    return 0;
  unsigned site = site_find(hash);
  return site ? site : add_here(hash);
}
