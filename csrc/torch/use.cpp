#include "use.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <string>

namespace esper
{
namespace
{

// To an element, beside those in the caller's frame: its container's.
constexpr Py_ssize_t references_of_element = 1;

// A function of the package, for what is easier to write in Python.
PyObject *python_helper(const char *module_name, const char *name)
{
  Reference module(PyImport_ImportModule(module_name));
  return module ? PyObject_GetAttrString(module.get(), name) : nullptr;
}

// Whether each of the elements that Python lists has a reference of the container's own. Others
// list what something else holds: views of dictionaries, proxies, sequences that a program defines.
bool holds_elements(PyObject *value)
{
  if (PyDict_CheckExact(value) || PyAnySet_CheckExact(value)) {
    return true;
  }
  Reference helper(python_helper("esper_alloc.uses.containers", "holds_children"));
  Reference answer(helper ? PyObject_CallOneArg(helper.get(), value) : nullptr);
  if (!answer) {
    throw python_error();
  }
  return answer.get() == Py_True;
}

std::atomic<bool> is_watched{false};

bool is_scalar(PyObject *value)
{
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value) ||
         PyUnicode_Check(value) || PyBytes_Check(value);
}

} // namespace

Gathering::Gathering()
    : may_save_(at::GradMode::is_enabled() || in_backward() ? MaySave::everything()
                                                            : MaySave::itself()),
      counts_(may_save_.is_everything()), mode_is_active_(c10::impl::dispatch_mode_enabled())
{
}

Gathering::Gathering(MaySave may_save)
    : may_save_(may_save), counts_(false), mode_is_active_(c10::impl::dispatch_mode_enabled())
{
}

Gathering::~Gathering()
{
  for (PyObject *other : others_) {
    Py_DECREF(other);
  }
}

void Gathering::add_argument(PyObject *value, const PassedArguments *passed)
{
  if (counts_ && passed != nullptr) {
    caller_ = CallersFrame::of_call(*passed);
  }
  // The caller's frame holds an argument. If C code makes the call, anything may: a tuple, a
  // thread, a partial(), or an object that it was read from.
  References given{0};
  if (counts_ && !caller_.is_known()) {
    given.unknown = Why::references;
  }
  if (!add(value, given) && value != Py_None) {
    const char *hint = PyIter_Check(value) ? ": make a list of it"
                       : PyObject_HasAttrString(value, "parameters")
                           ? ": pass list(module.parameters())"
                           : "";
    TORCH_CHECK_TYPE(false, "expected a tensor, or a container of tensors, not ",
                     Py_TYPE(value)->tp_name, hint);
  }
}

// Returns whether it was a tensor or a container.
bool Gathering::add(PyObject *value, const References &references)
{
  if (C10_LIKELY(THPVariable_CheckExact(value))) {
    add_tensor(value, THPVariable_Unpack(value), references);
    return true;
  }
  if (is_scalar(value)) {
    return false;
  }
  if (THPVariable_Check(value)) {
    add_wrapper(value);
    return true;
  }
  return add_children(value, references);
}

void Gathering::add_element(PyObject *value, const References &references)
{
  if (add(value, references) || is_scalar(value)) {
    return;
  }
  Reference helper(python_helper("esper_alloc.uses.containers", "pass_over"));
  Reference done(helper ? PyObject_CallOneArg(helper.get(), value) : nullptr);
  if (!done) {
    throw python_error();
  }
}

// If others hold the container (a checkpoint's closure, for example), they can reach its elements,
// so the caller does not hold those alone.
bool Gathering::add_children(PyObject *value, const References &references)
{
  References of_element{references_of_element};
  if (references.unknown != Why::nobody_else ||
      Py_REFCNT(value) > references.now() + caller_.references(value) ||
      has_weak_references(value)) {
    of_element.unknown = Why::container;
  }
  References with_ours = of_element;
  with_ours.passing = 1;
  const Descent descent;
  if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      add_element(PyTuple_GET_ITEM(value, i), of_element);
    }
    return true;
  }
  if (PyList_Check(value)) {
    // A tensor subclass may run Python, which may change the list.
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      Reference item(Py_NewRef(PyList_GET_ITEM(value, i)));
      add_element(item.get(), with_ours);
    }
    return true;
  }
  // Python lists the elements of dictionaries, sets, other mappings and dataclasses.
  if (counts_ && with_ours.unknown == Why::nobody_else && !holds_elements(value)) {
    with_ours.unknown = Why::container;
  }
  Reference helper(python_helper("esper_alloc.uses.containers", "children"));
  Reference children(helper ? PyObject_CallOneArg(helper.get(), value) : nullptr);
  if (!children) {
    throw python_error();
  }
  if (children.get() == Py_None) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children.get()); ++i) {
    add_element(PyTuple_GET_ITEM(children.get(), i), with_ours);
  }
  return true;
}

// A subclass of Tensor either has memory of its own or wraps tensors.
void Gathering::add_wrapper(PyObject *wrapper)
{
  const References of_wrapped{0, 0, Why::subclass};
  if (PyObject_HasAttrString(wrapper, "__tensor_flatten__")) {
    Reference flat(PyObject_CallMethod(wrapper, "__tensor_flatten__", nullptr));
    if (!flat) {
      throw python_error();
    }
    TORCH_CHECK_TYPE(PyTuple_Check(flat.get()) && PyTuple_GET_SIZE(flat.get()) == 2,
                     Py_TYPE(wrapper)->tp_name,
                     ".__tensor_flatten__() must return (names, context)");
    Reference names(
        PySequence_Fast(PyTuple_GET_ITEM(flat.get(), 0), "names of inner tensors expected"));
    if (!names) {
      throw python_error();
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(names.get()); ++i) {
      Reference inner(PyObject_GetAttr(wrapper, PySequence_Fast_GET_ITEM(names.get(), i)));
      if (!inner) {
        throw python_error();
      }
      add(inner.get(), of_wrapped); // what is not a tensor (a device mesh, say) needs no mark
    }
    return;
  }
  const at::Tensor &tensor = THPVariable_Unpack(wrapper);
  const auto *impl = tensor.unsafeGetTensorImpl();
  const bool has_memory =
      impl->has_storage() && impl->unsafe_storage() &&
      impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
  if (has_memory || tensor.layout() != at::kStrided) {
    add_tensor(wrapper, tensor, of_wrapped);
  } else if (!tensor.device().is_cpu() && !tensor.device().is_meta() &&
             tensor.sym_numel().maybe_as_int().value_or(1) != 0) { // unknown while it is traced
    others_.push_back(Py_NewRef(wrapper));
  }
}

void Gathering::add_tensor(PyObject *object, const at::Tensor &tensor, const References &references)
{
  // Wrappers of functorch and functionalisation have no memory of their own.
  constexpr c10::DispatchKeySet wrappers({c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper,
                                          c10::DispatchKey::Functionalize});
  if (C10_UNLIKELY(mode_is_active_ || tensor.key_set().has_any(wrappers))) {
    if (!tensor.device().is_cpu() && !tensor.device().is_meta()) {
      others_.push_back(Py_NewRef(object));
    }
    return;
  }
  const Why why = why_saved(object, tensor, references);
  if (why == Why::uncounted) {
    holders_.add(object, tensor, references.lasting);
  } else {
    add_memory(object, tensor, why);
  }
}

void Gathering::add_memory(PyObject *object, const at::Tensor &tensor, Why why)
{
  if (C10_UNLIKELY(!memory_.add(tensor, why != Why::nobody_else))) {
    others_.push_back(Py_NewRef(object));
  } else if (why != Why::nobody_else && tensor.is_cuda()) {
    whys_ |= 1u << static_cast<unsigned>(why);
  }
}

Why Gathering::why_saved(PyObject *object, const at::Tensor &tensor,
                         const References &references) const
{
  if (!counts_) {
    return may_save_(&tensor) ? Why::scope : Why::nobody_else;
  }
  return tensor.is_cuda() ? look_at(object, tensor, references, caller_) : Why::nobody_else;
}

void Gathering::mark(const End &end, const PythonEnd &python_end)
{
  holders_.decide(caller_, [&](PyObject *object, const at::Tensor &tensor, Why why) {
    add_memory(object, tensor, why);
  });
  if (!memory_.empty()) {
    TORCH_CHECK_VALUE(python_end.stream == Py_None || end.stream,
                      "a CUDA tensor cannot be marked on a stream of another kind of device");
    pybind11::gil_scoped_release no_gil;
    memory_.mark(end);
  }
  if (!others_.empty()) {
    mark_others(end, python_end);
  }
  // take() means until the free, and says so.
  if (C10_UNLIKELY(whys_ != 0) && end.gate_early && is_watched.load(std::memory_order_relaxed)) {
    note_whys();
  }
}

void Gathering::note_whys() const
{
  std::string words;
  for (unsigned why = 0; whys_ >> why != 0; ++why) {
    if ((whys_ >> why & 1u) != 0) {
      words += words.empty() ? "" : "; ";
      words += words_for(static_cast<Why>(why));
    }
  }
  Reference helper(python_helper("esper_alloc.torch_allocator.lasting_marks", "note"));
  Reference done(helper ? PyObject_CallFunction(helper.get(), "s", words.c_str()) : nullptr);
  if (!done) {
    throw python_error();
  }
}

void Gathering::mark_others(const End &end, const PythonEnd &python_end)
{
  const bool until_free = may_save_();
  if (counts_) {
    whys_ |= 1u << static_cast<unsigned>(Why::traced);
  }
  Reference tensors(PyList_New(0));
  for (PyObject *other : others_) {
    if (!tensors || PyList_Append(tensors.get(), other) < 0) {
      throw python_error();
    }
  }
  Reference helper(python_helper("esper_alloc.uses.use", "mark_others"));
  Reference done(helper
                     ? PyObject_CallFunctionObjArgs(helper.get(), tensors.get(), python_end.stream,
                                                    python_end.event, end.gate ? Py_True : Py_False,
                                                    until_free ? Py_True : Py_False, nullptr)
                     : nullptr);
  if (!done) {
    throw python_error();
  }
}

namespace
{

extern PyMethodDef tensor_method;

bool is_record_use(PyObject *object)
{
  if (object == nullptr) {
    return false;
  }
  if (PyCFunction_Check(object)) {
    const auto function = reinterpret_cast<void (*)()>(PyCFunction_GET_FUNCTION(object));
    return function == reinterpret_cast<void (*)()>(record_use) ||
           function == reinterpret_cast<void (*)()>(tensor_method.ml_meth);
  }
  return Py_IS_TYPE(object, &PyMethodDescr_Type) &&
         reinterpret_cast<PyMethodDescrObject *>(object)->d_method == &tensor_method;
}

// The arguments of a call, borrowed.
struct Arguments {
  PyObject *tensors = nullptr;
  PythonEnd end;
  PyObject *gate = Py_True;
  PassedArguments passed = {nullptr, nullptr, is_record_use};
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
  parsed.passed.first = self == nullptr ? args : args - 1;
  parsed.passed.behind = args + count + named;
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
    } else if (key == "gate") {
      parsed.gate = value;
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
  }
  end.gate = arguments.gate == Py_True;
  if (C10_UNLIKELY(!end.gate && arguments.gate != Py_False)) {
    Reference helper(python_helper("esper_alloc.uses.streams", "checked_bool"));
    Reference gate(helper ? PyObject_CallFunction(helper.get(), "sO", "gate", arguments.gate)
                          : nullptr);
    if (!gate) {
      throw python_error();
    }
    end.gate = gate.get() == Py_True;
  }

  Gathering found;
  found.add_argument(arguments.tensors, &arguments.passed);
  found.mark(end, arguments.end);
}

PyObject *record_use_method(PyObject *self, PyObject *const *args, Py_ssize_t count,
                            PyObject *names)
{
  HANDLE_TH_ERRORS
  mark(parse_arguments(self, args, count, names));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef tensor_method = {
    "record_use", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(record_use_method)),
    METH_FASTCALL | METH_KEYWORDS,
    "record_use($self, /, stream=None, *, event=None, gate=True)\n"
    "--\n\n"
    "Mark the end of use of this tensor on `stream`: esper_alloc.record_use()."};

} // namespace

PyObject *record_use(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count,
                     PyObject *names)
{
  HANDLE_TH_ERRORS
  mark(parse_arguments(nullptr, args, count, names));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *watch_marks(PyObject * /*module*/, PyObject *on)
{
  const int truth = PyObject_IsTrue(on);
  if (truth < 0) {
    return nullptr;
  }
  is_watched.store(truth != 0, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

PyObject *touch(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "touch() takes 2 arguments");
  End end;
  end.gate_early = false;
  PythonEnd python_end;
  python_end.stream = is_cpu_stream(args[1]) ? Py_None : args[1];
  if (python_end.stream != Py_None) {
    end.stream = unwrap_stream(python_end.stream);
  }
  Gathering found(MaySave::everything());
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
