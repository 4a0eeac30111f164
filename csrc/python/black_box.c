#define PY_SSIZE_T_CLEAN
#include "black_box.h"

#include <errno.h>

#include "../black_box/dump.h"
#include "../black_box/follow.h"
#include "../black_box/read.h"
#include "../black_box/recorder.h"

static PyObject *none_or_os_error(int error, PyObject *path)
{
  if (!error)
    Py_RETURN_NONE;
  errno = error;
  return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
}

PyDoc_STRVAR(write_doc, "black_box_write(path, why, info, /)\n--\n\n"
                        "Writes the black box to a file. `why`: at most 63 bytes; `info`: a JSON\n"
                        "object as a string. OSError: it cannot be written.");

static PyObject *black_box_write(PyObject *self, PyObject *arguments)
{
  (void)self;
  PyObject *path;
  const char *why, *info;
  if (!PyArg_ParseTuple(arguments, "O&ss:black_box_write", PyUnicode_FSConverter, &path, &why,
                        &info))
    return NULL;
  int error;
  Py_BEGIN_ALLOW_THREADS error = dump_to(PyBytes_AS_STRING(path), why, info, false);
  Py_END_ALLOW_THREADS PyObject *done = none_or_os_error(error, path);
  Py_DECREF(path);
  return done;
}

/* Calls a function with a path. */
static PyObject *with_path(PyObject *path, int (*function)(const char *))
{
  PyObject *bytes;
  if (!PyUnicode_FSConverter(path, &bytes))
    return NULL;
  PyObject *done = none_or_os_error(function(PyBytes_AS_STRING(bytes)), bytes);
  Py_DECREF(bytes);
  return done;
}

PyDoc_STRVAR(at_oom_doc,
             "black_box_at_oom(path, /)\n--\n\n"
             "Where the black box is written when memory runs out. OSError: the path is\n"
             "too long.");

static PyObject *black_box_at_oom(PyObject *self, PyObject *path)
{
  (void)self;
  return with_path(path, dump_at_oom);
}

PyDoc_STRVAR(at_signals_doc,
             "black_box_at_signals(path, /)\n--\n\n"
             "SIGUSR2 and fatal signals write the black box to a file from now on.\n"
             "OSError: they cannot be handled, or the path is too long.");

static PyObject *black_box_at_signals(PyObject *self, PyObject *path)
{
  (void)self;
  return with_path(path, dump_at_signals);
}

PyDoc_STRVAR(stats_doc, "black_box_stats()\n--\n\n"
                        "(whether it records, events lost, bytes of host memory, chunks of events\n"
                        "that were overwritten)");

static PyObject *black_box_stats(PyObject *self, PyObject *ignored)
{
  (void)self, (void)ignored;
  box_stats_t stats = box_stats();
  return Py_BuildValue("(NKKK)", PyBool_FromLong(stats.on), (unsigned long long)stats.events_lost,
                       (unsigned long long)stats.bytes,
                       (unsigned long long)stats.chunks_used_again);
}

PyDoc_STRVAR(follow_doc,
             "black_box_follow(socket, since, first_site, /)\n--\n\n"
             "Writes what happened after `since`, in ticks, and the places from a number on to a\n"
             "socket, in the form of a file: csrc/black_box/follow.h. Without the interpreter's\n"
             "lock. OSError: it cannot be written.");

static PyObject *black_box_follow(PyObject *self, PyObject *arguments)
{
  (void)self;
  int socket, error;
  unsigned long long since;
  unsigned first_site;
  if (!PyArg_ParseTuple(arguments, "iKI:black_box_follow", &socket, &since, &first_site))
    return NULL;
  Py_BEGIN_ALLOW_THREADS error = box_follow(socket, since, first_site);
  Py_END_ALLOW_THREADS return none_or_os_error(error, NULL);
}

/* ---- reading ------------------------------------------------------------------ */

#define BYTES(pointer, count) \
  PyBytes_FromStringAndSize((const char *)(pointer), (Py_ssize_t)((count) * sizeof *(pointer)))

static PyObject *dict_of(const box_file_t *file)
{
  const box_events_t *e = &file->events;
  const box_header_t *h = &file->header;
  return Py_BuildValue(
      "{s:s,s:K,s:K,s:K,s:L,s:L,s:L,s:N,s:N,s:N,s:n,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N}",
      "why", h->why, "pid", (unsigned long long)h->pid, "lost", (unsigned long long)h->lost,
      "version", (unsigned long long)h->version, "begin", (long long)h->begin_ns, "end",
      (long long)h->end_ns, "complete", (long long)file->complete_ns, "info",
      BYTES(file->info, file->info_bytes), "lanes", BYTES(file->lanes, file->lane_count), "sites",
      BYTES(file->sites, file->site_bytes), "site_count", (Py_ssize_t)file->site_count, "segments",
      BYTES(file->segments, file->segment_count), "blocks", BYTES(file->blocks, file->block_count),
      "kind", BYTES(e->kind, e->count), "ns", BYTES(e->ns, e->count), "address",
      BYTES(e->address, e->count), "size", BYTES(e->size, e->count), "lane",
      BYTES(e->lane, e->count), "site", BYTES(e->site, e->count), "thread",
      BYTES(e->thread, e->count), "partner", BYTES(e->partner, e->count));
}

PyDoc_STRVAR(read_doc,
             "black_box_read(file, /)\n--\n\n"
             "What the bytes of a file say, as a dict of numbers and of columns in bytes.\n"
             "ValueError: it is no such file, or damaged; half a sentence says so.");

static PyObject *black_box_read(PyObject *self, PyObject *bytes)
{
  (void)self;
  if (!PyBytes_Check(bytes))
    return PyErr_Format(PyExc_TypeError, "the file's content is %s: pass bytes",
                        Py_TYPE(bytes)->tp_name);
  box_file_t file;
  const char *wrong;
  Py_BEGIN_ALLOW_THREADS wrong =
      box_read(PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes), &file);
  Py_END_ALLOW_THREADS if (wrong)
  {
    PyErr_SetString(PyExc_ValueError, wrong);
    return NULL;
  }
  PyObject *dict = dict_of(&file);
  box_forget(&file);
  return dict;
}

PyMethodDef esper_py_black_box_methods[] = {
    {"black_box_write", black_box_write, METH_VARARGS, write_doc},
    {"black_box_at_oom", black_box_at_oom, METH_O, at_oom_doc},
    {"black_box_at_signals", black_box_at_signals, METH_O, at_signals_doc},
    {"black_box_stats", black_box_stats, METH_NOARGS, stats_doc},
    {"black_box_follow", black_box_follow, METH_VARARGS, follow_doc},
    {"black_box_read", black_box_read, METH_O, read_doc},
    {0},
};
