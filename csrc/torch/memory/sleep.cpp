#include "sleep.h"

#include <torch/csrc/Exceptions.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../base/gil.h"
#include "../base/python_objects.h"
#include "../ipc/sharing.h"
#include "../start/the_core.h"
#include "workspaces.h"

namespace esper
{
namespace
{

const char *text_of(PyObject *value)
{
  Py_ssize_t size = 0;
  TORCH_CHECK_TYPE(PyUnicode_Check(value), "a tag is a str, not ", Py_TYPE(value)->tp_name);
  const char *text = PyUnicode_AsUTF8AndSize(value, &size);
  if (text == nullptr) {
    throw python_error();
  }
  TORCH_CHECK_VALUE(std::strlen(text) == static_cast<size_t>(size),
                    "a tag cannot have a character 0 in it: leave it out");
  return text;
}

// The names in a tuple of str; all() if it is None.
class Tags
{
public:
  explicit Tags(PyObject *tags) : all_(tags == Py_None)
  {
    const Py_ssize_t count = all_ ? 0 : PyTuple_Size(tags);
    if (count < 0) {
      throw python_error();
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      names_.push_back(text_of(PyTuple_GET_ITEM(tags, i))); // which keeps the text
    }
  }
  const char *const *names() const
  {
    static const char *const none = "";
    return all_ ? nullptr : names_.empty() ? &none : names_.data();
  }
  size_t count() const
  {
    return names_.size();
  }

private:
  bool all_;
  std::vector<const char *> names_;
};

int device_of(PyObject *value)
{
  const long device = PyLong_AsLong(value);
  if (device == -1 && PyErr_Occurred() != nullptr) {
    throw python_error();
  }
  return static_cast<int>(device);
}

void expect_count(Py_ssize_t count, Py_ssize_t wanted)
{
  TORCH_CHECK_TYPE(count == wanted, "expected ", wanted, " arguments, got ", count);
}

} // namespace

PyObject *push_tag(PyObject * /*module*/, PyObject *name)
{
  HANDLE_TH_ERRORS
  const esper_status status = capi().tag_push(text_of(name));
  TORCH_CHECK_VALUE(status != ESPER_INVALID, capi().last_error());
  check(status, "pushing a tag");
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *pop_tag(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  check(capi().tag_pop(), "popping a tag");
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *put_to_sleep(PyObject * /*module*/, PyObject *const *arguments, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  expect_count(count, 3);
  const Tags tags(arguments[0]);
  const esper_keep keep = arguments[1] == Py_True ? ESPER_KEEP_HOST : ESPER_KEEP_NOTHING;
  const int device = device_of(arguments[2]);
  esper_core *the_core = core();
  esper_sleep_result result{};
  esper_status status = ESPER_OK;
  {
    const WithoutGil no_gil;
    forget_unshared(); // else that memory stays
    status = capi().sleep(the_core, device, tags.names(), tags.count(), keep, &result);
    if (status == ESPER_OK) { // else last_error() would be lost
      update_workspaces();
    }
  }
  TORCH_CHECK_VALUE(status != ESPER_INVALID, capi().last_error());
  check(status, "putting memory to sleep");
  PyObject *stays = expect(PyTuple_New(ESPER_STAYS_COUNT));
  for (int i = 0; i < ESPER_STAYS_COUNT; ++i) {
    PyTuple_SET_ITEM(stays, i,
                     Py_BuildValue("(ns)", static_cast<Py_ssize_t>(result.stays[i]),
                                   capi().stays_advice(static_cast<esper_stays>(i))));
  }
  return Py_BuildValue("(nnN)", static_cast<Py_ssize_t>(result.given_back),
                       static_cast<Py_ssize_t>(result.kept), stays);
  END_HANDLE_TH_ERRORS
}

// After an error as well, for the devices that woke before it. By then the exception has
// last_error(), which this may replace.
struct UpdateWorkspacesAtTheEnd {
  ~UpdateWorkspacesAtTheEnd()
  {
    try {
      const WithoutGil no_gil;
      update_workspaces();
    } catch (const std::exception &) {
      // They rest until the next wake.
    }
  }
};

PyObject *wake_up(PyObject * /*module*/, PyObject *const *arguments, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  expect_count(count, 2);
  const Tags tags(arguments[0]);
  const int device = device_of(arguments[1]);
  esper_core *the_core = core();
  size_t woken = 0;
  const UpdateWorkspacesAtTheEnd at_the_end;
  esper_status status = ESPER_OK;
  {
    const WithoutGil no_gil;
    forget_unshared(); // which makes room
    status = capi().wake(the_core, device, tags.names(), tags.count(), &woken);
  }
  TORCH_CHECK_VALUE(status != ESPER_INVALID, capi().last_error());
  TORCH_CHECK_WITH(OutOfMemoryError, status != ESPER_OUT_OF_MEMORY && status != ESPER_REJECTED,
                   "esper_alloc, waking memory: ", capi().last_error(),
                   ". Everything on this device still sleeps; free memory and wake it again");
  check(status, "waking memory");
  return PyLong_FromSize_t(woken);
  END_HANDLE_TH_ERRORS
}

PyObject *trim_sleep(PyObject * /*module*/, PyObject * /*none*/)
{
  HANDLE_TH_ERRORS
  if (esper_core *made = core_if_made()) {
    const WithoutGil no_gil;
    capi().sleep_trim(made);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *tag_stats(PyObject * /*module*/, PyObject *device)
{
  HANDLE_TH_ERRORS
  esper_tag_stats *figures = nullptr;
  size_t count = 0;
  const int index = device_of(device);
  esper_core *the_core = core();
  esper_status status = ESPER_OK;
  {
    const WithoutGil no_gil; // a sleep or wake in another thread takes seconds
    status = capi().get_tag_stats(the_core, index, &figures, &count);
  }
  check(status, "reading tags");
  const std::unique_ptr<esper_tag_stats, decltype(&std::free)> owned(figures, &std::free);
  PyObject *list = expect(PyList_New(0));
  for (size_t i = 0; list != nullptr && i < count; ++i) {
    const esper_tag_stats &tag = figures[i];
    PyObject *dict = Py_BuildValue("{s:s,s:O,s:n,s:n,s:n,s:n}", "tag", tag.name, "asleep",
                                   tag.asleep != 0 ? Py_True : Py_False, "allocated_bytes",
                                   static_cast<Py_ssize_t>(tag.allocated), "reserved_bytes",
                                   static_cast<Py_ssize_t>(tag.reserved), "sleeping_bytes",
                                   static_cast<Py_ssize_t>(tag.sleeping), "host_bytes",
                                   static_cast<Py_ssize_t>(tag.host));
    if (dict == nullptr || PyList_Append(list, dict) < 0) {
      Py_CLEAR(list);
    }
    Py_XDECREF(dict);
  }
  return list;
  END_HANDLE_TH_ERRORS
}

PyObject *pool_asleep(PyObject * /*module*/, PyObject *id)
{
  HANDLE_TH_ERRORS
  unsigned long long first = 0;
  unsigned long long second = 0;
  if (PyArg_ParseTuple(id, "KK", &first, &second) == 0) {
    return nullptr;
  }
  esper_core *made = core_if_made();
  return PyLong_FromSize_t(made != nullptr ? capi().pool_asleep(made, -1, first, second) : 0);
  END_HANDLE_TH_ERRORS
}

} // namespace esper
