#include "audit_findings.h"

#include "../base/python_objects.h"
#include "../debugging/sites.h"
#include "audit_engine.h"
#include "operations.h"

namespace esper::auditing
{

namespace
{

// Puts a new reference into the dict, and drops it. False with a Python exception.
bool put(PyObject *dict, const char *key, PyObject *value)
{
  const Reference owned(value);
  return owned && PyDict_SetItemString(dict, key, value) == 0;
}

PyObject *none()
{
  Py_RETURN_NONE;
}

PyObject *describe_stream(const audit_stream &stream)
{
  return Py_BuildValue("(iK)", stream.device, static_cast<unsigned long long>(stream.handle));
}

PyObject *describe_point(const audit_point &point, const std::string &tensor)
{
  Reference dict(PyDict_New());
  const std::string name = operation_name(point.place.operation);
  const bool fine = dict && put(dict.get(), "site", sites::describe(point.place.site)) &&
                    put(dict.get(), "operator", PyUnicode_FromString(name.c_str())) &&
                    put(dict.get(), "tensor", PyUnicode_FromString(tensor.c_str())) &&
                    put(dict.get(), "stream", describe_stream(point.stream)) &&
                    put(dict.get(), "writes", PyBool_FromLong(point.writes)) &&
                    put(dict.get(), "is_allocation", PyBool_FromLong(point.is_allocation));
  return fine ? Py_NewRef(dict.get()) : nullptr;
}

// A finding, with what the auditor's tables say of it.
struct Found {
  audit_finding finding;
  std::string earlier, later; // tensors
};

PyObject *describe_finding(const Found &found)
{
  const audit_finding &f = found.finding;
  static const char *const kinds[] = {"freed-in-use", "marked-early", "read-early",
                                      "write-early",  "stale-output", "used-after-free"};
  static_assert(std::size(kinds) == AUDIT_KINDS);
  Reference dict(PyDict_New());
  const bool fine =
      dict && put(dict.get(), "kind", PyUnicode_FromString(kinds[f.kind])) &&
      put(dict.get(), "count", PyLong_FromUnsignedLongLong(f.count)) &&
      put(dict.get(), "address", PyLong_FromUnsignedLongLong(f.address)) &&
      put(dict.get(), "size", PyLong_FromSize_t(f.size)) &&
      put(dict.get(), "allocated", sites::describe(f.allocated)) &&
      put(dict.get(), "home", f.home_is_known ? describe_stream(f.home) : none()) &&
      put(dict.get(), "earlier", describe_point(f.earlier, found.earlier)) &&
      put(dict.get(), "later", f.has_later ? describe_point(f.later, found.later) : none()) &&
      put(dict.get(), "freed", sites::describe(f.freed)) &&
      put(dict.get(), "marked", sites::describe(f.marked)) &&
      put(dict.get(), "cause", PyLong_FromSize_t(f.cause)) &&
      put(dict.get(), "stands_alone", PyBool_FromLong(f.stands_alone));
  return fine ? Py_NewRef(dict.get()) : nullptr;
}

PyObject *describe_use(const std::optional<audit_finding> &use)
{
  if (!use) {
    return none();
  }
  Found found{*use, {}, {}};
  {
    Auditor &a = auditor();
    std::lock_guard<std::mutex> lock(a.mutex);
    found.earlier = a.shapes.text(use->earlier.place.tensor);
  }
  return describe_finding(found);
}

} // namespace

PyObject *describe_freed(const fence::Freed &freed)
{
  Reference dict(PyDict_New());
  const bool fine =
      dict && put(dict.get(), "address", PyLong_FromUnsignedLongLong(freed.address)) &&
      put(dict.get(), "size", PyLong_FromSize_t(freed.size)) &&
      put(dict.get(), "home", describe_stream({freed.device, freed.home})) &&
      put(dict.get(), "allocated", sites::describe(freed.allocated)) &&
      put(dict.get(), "freed", sites::describe(freed.freed)) &&
      put(dict.get(), "frees_ago", PyLong_FromUnsignedLongLong(fence::frees() - freed.number)) &&
      put(dict.get(), "seconds", PyFloat_FromDouble(freed.seconds)) &&
      put(dict.get(), "in_use", describe_use(freed.in_use));
  return fine ? Py_NewRef(dict.get()) : nullptr;
}

PyObject *describe_last_freed(size_t most, bool only_in_use)
{
  Reference list(PyList_New(0));
  for (const fence::Freed &freed : fence::last_freed(most, only_in_use)) {
    const Reference entry(list ? describe_freed(freed) : nullptr);
    if (!entry || PyList_Append(list.get(), entry.get()) != 0) {
      return nullptr;
    }
  }
  return Py_XNewRef(list.get());
}

void keep_tensors(Auditor &a)
{
  for (size_t i = a.found_tensors.size(); i < functions->finding_count(a.engine); ++i) {
    const audit_finding &f = *functions->finding_at(a.engine, i);
    a.found_tensors.emplace_back(a.shapes.text(f.earlier.place.tensor),
                                 a.shapes.text(f.later.place.tensor));
  }
}

PyObject *describe_findings()
{
  // Making Python objects may collect garbage and free tensors, so the lock is not held for that.
  Auditor &a = auditor();
  std::vector<Found> all;
  {
    std::lock_guard<std::mutex> lock(a.mutex);
    for (size_t i = 0; a.engine != nullptr && i < functions->finding_count(a.engine); ++i) {
      const audit_finding &f = *functions->finding_at(a.engine, i);
      all.push_back({f, a.found_tensors[i].first, a.found_tensors[i].second});
    }
  }
  Reference list(PyList_New(0));
  for (const Found &found : all) {
    const Reference finding(list ? describe_finding(found) : nullptr);
    if (!finding || PyList_Append(list.get(), finding.get()) != 0) {
      return nullptr;
    }
  }
  return Py_XNewRef(list.get());
}

} // namespace esper::auditing
