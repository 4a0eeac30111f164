#include "use.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>

namespace esper
{
namespace
{

// A function of the package, for what is easier to write in Python.
Reference python_helper(const char *module_name, const char *name)
{
  const Reference module(expect(PyImport_ImportModule(module_name)));
  return Reference(expect(PyObject_GetAttrString(module.get(), name)));
}

bool is_scalar(PyObject *value)
{
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value) ||
         PyUnicode_Check(value) || PyBytes_Check(value);
}

} // namespace

Gathering::Gathering() : mode_is_active_(c10::impl::dispatch_mode_enabled())
{
}

Gathering::~Gathering()
{
  for (PyObject *other : others_) {
    Py_DECREF(other);
  }
}

void Gathering::add_argument(PyObject *value)
{
  if (!add(value) && value != Py_None) {
    const char *hint = PyIter_Check(value) ? ": make a list of it"
                       : PyObject_HasAttrString(value, "parameters")
                           ? ": pass list(module.parameters())"
                           : "";
    TORCH_CHECK_TYPE(false, "expected a tensor, or a container of tensors, not ",
                     Py_TYPE(value)->tp_name, hint);
  }
}

// Returns whether it was a tensor or a container.
bool Gathering::add(PyObject *value)
{
  if (C10_LIKELY(THPVariable_CheckExact(value))) {
    add_tensor(value, THPVariable_Unpack(value));
    return true;
  }
  if (is_scalar(value)) {
    return false;
  }
  if (THPVariable_Check(value)) {
    add_wrapper(value);
    return true;
  }
  return add_children(value);
}

void Gathering::add_element(PyObject *value)
{
  if (add(value) || is_scalar(value)) {
    return;
  }
  const Reference helper = python_helper("esper_alloc.uses.containers", "pass_over");
  const Reference done(expect(PyObject_CallOneArg(helper.get(), value)));
}

bool Gathering::add_children(PyObject *value)
{
  const Descent descent;
  if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      add_element(PyTuple_GET_ITEM(value, i));
    }
    return true;
  }
  if (PyList_Check(value)) {
    // A tensor subclass may run Python, which may change the list.
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      Reference item(Py_NewRef(PyList_GET_ITEM(value, i)));
      add_element(item.get());
    }
    return true;
  }
  // Python lists the elements of dictionaries, sets, other mappings and dataclasses.
  const Reference helper = python_helper("esper_alloc.uses.containers", "children");
  const Reference children(expect(PyObject_CallOneArg(helper.get(), value)));
  if (children.get() == Py_None) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children.get()); ++i) {
    add_element(PyTuple_GET_ITEM(children.get(), i));
  }
  return true;
}

// A subclass of Tensor either has memory of its own or wraps tensors.
void Gathering::add_wrapper(PyObject *wrapper)
{
  if (PyObject_HasAttrString(wrapper, "__tensor_flatten__")) {
    const Reference flat(expect(PyObject_CallMethod(wrapper, "__tensor_flatten__", nullptr)));
    TORCH_CHECK_TYPE(PyTuple_Check(flat.get()) && PyTuple_GET_SIZE(flat.get()) == 2,
                     Py_TYPE(wrapper)->tp_name,
                     ".__tensor_flatten__() must return (names, context)");
    const Reference names(expect(
        PySequence_Fast(PyTuple_GET_ITEM(flat.get(), 0), "names of inner tensors expected")));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(names.get()); ++i) {
      const Reference inner(
          expect(PyObject_GetAttr(wrapper, PySequence_Fast_GET_ITEM(names.get(), i))));
      add(inner.get()); // what is not a tensor (a device mesh, say) needs no mark
    }
    return;
  }
  const at::Tensor &tensor = THPVariable_Unpack(wrapper);
  const auto *impl = tensor.unsafeGetTensorImpl();
  const bool has_memory =
      impl->has_storage() && impl->unsafe_storage() &&
      impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
  if (has_memory || tensor.layout() != at::kStrided) {
    add_tensor(wrapper, tensor);
  } else if (!tensor.device().is_cpu() && !tensor.device().is_meta() &&
             tensor.sym_numel().maybe_as_int().value_or(1) != 0) { // unknown while it is traced
    others_.push_back(Py_NewRef(wrapper));
  }
}

void Gathering::add_tensor(PyObject *object, const at::Tensor &tensor)
{
  // Wrappers of functorch and functionalisation have no memory of their own.
  constexpr c10::DispatchKeySet wrappers({c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper,
                                          c10::DispatchKey::Functionalize});
  if (C10_UNLIKELY(mode_is_active_ || tensor.key_set().has_any(wrappers))) {
    if (!tensor.device().is_cpu() && !tensor.device().is_meta()) {
      others_.push_back(Py_NewRef(object));
    }
  } else if (C10_UNLIKELY(!memory_.add(tensor))) {
    others_.push_back(Py_NewRef(object));
  }
}

void Gathering::mark(const End &end, const PythonEnd &python_end)
{
  if (!memory_.empty()) {
    TORCH_CHECK_VALUE(python_end.stream == Py_None || end.stream,
                      "a CUDA tensor cannot be marked on a stream of another kind of device");
    pybind11::gil_scoped_release no_gil;
    memory_.mark(end);
  }
  if (!others_.empty()) {
    mark_others(end, python_end);
  }
}

void Gathering::mark_others(const End &end, const PythonEnd &python_end)
{
  const Reference tensors(expect(PyList_New(0)));
  for (PyObject *other : others_) {
    if (PyList_Append(tensors.get(), other) < 0) {
      throw python_error();
    }
  }
  const Reference helper = python_helper("esper_alloc.uses.use", "mark_others");
  const Reference done(expect(
      PyObject_CallFunctionObjArgs(helper.get(), tensors.get(), python_end.stream, python_end.event,
                                   end.until_free ? Py_True : Py_False, nullptr)));
}

namespace
{

// The arguments of a call, borrowed.
struct Arguments {
  PyObject *tensors = nullptr;
  PythonEnd end;
};

// `self` NULL: the function was called, and its first argument is the tensors.
Arguments parse_arguments(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
  Arguments parsed;
  parsed.tensors = self;
  const Py_ssize_t first = self == nullptr ? 1 : 0; // position of the stream
  TORCH_CHECK_TYPE(count <= first + 1, "record_use() takes at most ", first + 1,
                   " positional arguments, not ", count);
  if (first == 1 && count > 0) {
    parsed.tensors = args[0];
  }
  if (count > first) {
    parsed.end.stream = args[first];
  }
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
    if (name == nullptr) {
      throw python_error();
    }
    PyObject *value = args[count + i];
    const std::string_view key(name);
    if (key == "stream" && count <= first) {
      parsed.end.stream = value;
    } else if (key == "event") {
      parsed.end.event = value;
    } else if (key == "tensors" && self == nullptr && count < 1) {
      parsed.tensors = value;
    } else {
      TORCH_CHECK_TYPE(false, "record_use() got an unexpected argument '", name, "'");
    }
  }
  TORCH_CHECK_TYPE(parsed.tensors != nullptr, "record_use() needs tensors to mark");
  return parsed;
}

void mark(Arguments arguments)
{
  End end;
  if (is_cpu_stream(arguments.end.stream)) {
    arguments.end.stream = Py_None;
  }
  if (arguments.end.stream != Py_None) {
    end.stream = unwrap_stream(arguments.end.stream);
  }
  if (arguments.end.event != Py_None) {
    end.event = unwrap_event(arguments.end.event);
  } else {
    end.until_free = autograd_may_read();
  }
  Gathering found;
  found.add_argument(arguments.tensors);
  found.mark(end, arguments.end);
}

// The shortest way, for what nearly every call passes: a tensor with memory of this allocator, and
// a CUDA stream. False: it is something else, and nothing was marked.
bool mark_plainly(PyObject *tensor, PyObject *stream)
{
  if (!THPVariable_CheckExact(tensor) || !PyObject_TypeCheck(stream, THPStreamClass) ||
      c10::impl::dispatch_mode_enabled()) {
    return false;
  }
  const void *memory = plain_memory(THPVariable_Unpack(tensor));
  const auto on = memory != nullptr ? unwrap_stream(stream) : std::nullopt;
  if (!on) {
    return false;
  }
  const bool until_free = autograd_may_read();
  pybind11::gil_scoped_release no_gil;
  mark_plain_memory(memory, *on, until_free);
  return true;
}

PyObject *record_use_method(PyObject *self, PyObject *const *args, Py_ssize_t count,
                            PyObject *names)
{
  HANDLE_TH_ERRORS
  if (count != 1 || names != nullptr || !mark_plainly(self, args[0])) {
    mark(parse_arguments(self, args, count, names));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef tensor_method = {
    "record_use", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(record_use_method)),
    METH_FASTCALL | METH_KEYWORDS,
    "record_use($self, /, stream=None, *, event=None)\n"
    "--\n\n"
    "Mark the end of use of this tensor on `stream`: esper_alloc.record_use()."};

} // namespace

PyObject *record_use(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count,
                     PyObject *names)
{
  HANDLE_TH_ERRORS
  if (count != 2 || names != nullptr || !mark_plainly(args[0], args[1])) {
    mark(parse_arguments(nullptr, args, count, names));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *touch(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "touch() takes 2 arguments");
  End end;
  end.until_free = true;
  PythonEnd python_end;
  python_end.stream = is_cpu_stream(args[1]) ? Py_None : args[1];
  if (python_end.stream != Py_None) {
    end.stream = unwrap_stream(python_end.stream);
  }
  Gathering found;
  found.add_argument(args[0]);
  found.mark(end, python_end);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *make_tensor_method(PyObject * /*module*/, PyObject *tensor_class)
{
  if (!PyType_Check(tensor_class)) {
    PyErr_SetString(PyExc_TypeError, "make_tensor_method() takes a class");
    return nullptr;
  }
  return PyDescr_NewMethod(reinterpret_cast<PyTypeObject *>(tensor_class), &tensor_method);
}

} // namespace esper
