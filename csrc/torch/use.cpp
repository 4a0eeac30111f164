#include "use.h"

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <mutex>
#include <unordered_map>

#include "allocator.h"
#include "core_api.h"
#include "stream.h"

namespace esper {
namespace {

using c10::cuda::CUDAStream;

// A call's argument is held by the caller's variable and, before Python 3.14,
// by the interpreter's stack; an element of a container by the container.
#if PY_VERSION_HEX >= 0x030E0000
constexpr Py_ssize_t references_of_argument = 1;
#else
constexpr Py_ssize_t references_of_argument = 2;
#endif
constexpr Py_ssize_t references_of_element = 1;

// The core that may know foreign-looking addresses: ours, or the one under
// torch's CUDAPluggableAllocator. Null: PyTorch does not run on us.
esper_core* core_that_serves() {
  if (esper_core* made = core_if_made()) {
    return made;
  }
  return native::get()->name() == "pluggable" ? core() : nullptr;
}

bool is_ours(const c10::DataPtr& data) {
  if (data.get_deleter() == &delete_memory) {
    return true;
  }
  // Our memory wears other deleters too: behind DLPack, copy-on-write, the
  // pluggable allocator.
  esper_core* made = core_that_serves();
  esper_block_info block;
  return made != nullptr &&
      capi().find_block(made, data.get(), &block) == ESPER_OK &&
      block.live;
}

CUDAStream stream_for(const End& end, c10::DeviceIndex device) {
  return end.stream ? *end.stream : c10::cuda::getCurrentCUDAStream(device);
}

// A stream that ends with `event`, for allocators that know only streams: one
// of our own for each device, so that no stream of the user waits.
CUDAStream stream_behind(const RecordedEvent& event) {
  static std::mutex mutex;
  static auto* streams =
      new std::unordered_map<c10::DeviceIndex, cudaStream_t>();
  std::lock_guard<std::mutex> lock(mutex);
  c10::cuda::CUDAGuard guard(event.device);
  cudaStream_t& stream = (*streams)[event.device];
  if (stream == nullptr) {
    C10_CUDA_CHECK(
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event.handle, 0));
  return c10::cuda::getStreamFromExternal(stream, event.device);
}

// Marks blocks, with one event for all that share a stream.
template <class Blocks>
void mark_precise(const Blocks& blocks, const End& end) {
  if (blocks.empty()) {
    return;
  }
  const unsigned flags = end.gate ? 0u : unsigned{ESPER_USE_NO_GATE};
  esper_core* made = core();
  c10::SmallVector<const void*, 8> group;
  // Without a stream each device has its own current one.
  const bool split = !end.stream && !end.event;
  c10::SmallVector<bool, 8> done(blocks.size(), false);
  for (size_t first = 0; first < blocks.size(); ++first) {
    if (done[first]) {
      continue;
    }
    const c10::DeviceIndex device = blocks[first].device;
    group.clear();
    for (size_t i = first; i < blocks.size(); ++i) {
      if (!done[i] && (!split || blocks[i].device == device)) {
        group.push_back(blocks[i].ptr);
        done[i] = true;
      }
    }
    const esper_status status = end.event
        ? capi().record_use_event(
              made,
              group.data(),
              group.size(),
              end.event->handle,
              end.event->device,
              flags,
              nullptr)
        : capi().record_use(
              made,
              group.data(),
              group.size(),
              to_esper(stream_for(end, device)),
              flags,
              nullptr);
    check(status, "record_use");
  }
}

template <class Blocks>
void mark_until_free(const Blocks& blocks, const End& end) {
  for (const auto& block : blocks) {
    // An event does not say which stream it is on, and that stream is where
    // backward reads.
    const bool unknown = end.event && !end.stream;
    const esper_status status = unknown
        ? capi().free_after_all(core(), const_cast<void*>(block.ptr))
        : capi().record_stream(
              core(), block.ptr, to_esper(stream_for(end, block.device)));
    check(status, "record_use of a tensor that autograd may have saved");
  }
}

void mark_foreign(const at::Tensor& tensor, const End& end) {
  const CUDAStream stream = end.event && !end.stream
      ? stream_behind(*end.event)
      : stream_for(end, tensor.device().index());
  tensor.record_stream(stream.unwrap());
}

// A function of esper_alloc.use, which holds what is easier said in Python.
PyObject* python_helper(const char* name) {
  Reference module(PyImport_ImportModule("esper_alloc.use"));
  return module ? PyObject_GetAttrString(module.get(), name) : nullptr;
}

bool is_scalar(PyObject* value) {
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value) ||
      PyUnicode_Check(value) || PyBytes_Check(value);
}

} // namespace

Gathering::~Gathering() {
  for (PyObject* other : others_) {
    Py_DECREF(other);
  }
}

void Gathering::add_argument(PyObject* value, Py_ssize_t references) {
  if (!add(value, references) && value != Py_None) {
    TORCH_CHECK_TYPE(
        false,
        "expected a tensor, or a container of tensors, not ",
        Py_TYPE(value)->tp_name);
  }
}

// Whether it was a tensor or a container.
bool Gathering::add(PyObject* value, Py_ssize_t references) {
  if (C10_LIKELY(THPVariable_CheckExact(value))) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    add_tensor(tensor, may_be_saved(value, tensor, references));
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

void Gathering::add_element(PyObject* value, Py_ssize_t references) {
  if (add(value, references) || is_scalar(value)) {
    return;
  }
  Reference helper(python_helper("_pass_over"));
  Reference done(helper ? PyObject_CallOneArg(helper.get(), value) : nullptr);
  if (!done) {
    throw python_error();
  }
}

// What others hold, a checkpoint's closure for one, they can reach into: of its
// elements no reference is the caller's alone.
bool Gathering::add_children(PyObject* value, Py_ssize_t references) {
  const Py_ssize_t of_element =
      Py_REFCNT(value) <= references ? references_of_element : -1;
  if (Py_EnterRecursiveCall(" while looking for tensors") != 0) {
    throw python_error();
  }
  struct Leave {
    ~Leave() {
      Py_LeaveRecursiveCall();
    }
  } leave;
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
      add_element(item.get(), of_element + 1);
    }
    return true;
  }
  // Dictionaries, sets, other mappings, dataclasses: listed by Python.
  Reference helper(python_helper("_children"));
  Reference children(
      helper ? PyObject_CallOneArg(helper.get(), value) : nullptr);
  if (!children) {
    throw python_error();
  }
  if (children.get() == Py_None) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children.get()); ++i) {
    add_element(
        PyTuple_GET_ITEM(children.get(), i), of_element + 1);
  }
  return true;
}

// A subclass of Tensor: memory of its own, or tensors inside.
void Gathering::add_wrapper(PyObject* wrapper) {
  if (PyObject_HasAttrString(wrapper, "__tensor_flatten__")) {
    Reference flat(
        PyObject_CallMethod(wrapper, "__tensor_flatten__", nullptr));
    if (!flat) {
      throw python_error();
    }
    TORCH_CHECK_TYPE(
        PyTuple_Check(flat.get()) && PyTuple_GET_SIZE(flat.get()) == 2,
        Py_TYPE(wrapper)->tp_name,
        ".__tensor_flatten__() must return (names, context)");
    Reference names(PySequence_Fast(
        PyTuple_GET_ITEM(flat.get(), 0), "names of inner tensors expected"));
    if (!names) {
      throw python_error();
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(names.get()); ++i) {
      Reference inner(PyObject_GetAttr(
          wrapper, PySequence_Fast_GET_ITEM(names.get(), i)));
      if (!inner) {
        throw python_error();
      }
      add_element(inner.get(), 0);
    }
    return;
  }
  const at::Tensor& tensor = THPVariable_Unpack(wrapper);
  const auto* impl = tensor.unsafeGetTensorImpl();
  const bool has_memory = impl->has_storage() && impl->unsafe_storage() &&
      impl->unsafe_storage()
              .unsafeGetStorageImpl()
              ->_mutable_data_ptr_no_checks()
              .get() != nullptr;
  if (has_memory || tensor.layout() != at::kStrided) {
    add_tensor(tensor, may_be_saved(wrapper, tensor, 0));
  } else if (tensor.numel() != 0 && !tensor.device().is_cpu()) {
    others_.push_back(Py_NewRef(wrapper));
  }
}

void Gathering::add_tensor(const at::Tensor& tensor, bool may_be_saved) {
  const c10::Device device = tensor.device();
  if (device.is_cpu() || device.is_meta()) {
    return;
  }
  switch (tensor.layout()) {
    case at::kSparse:
      add_tensor(tensor._indices(), may_be_saved);
      add_tensor(tensor._values(), may_be_saved);
      return;
    case at::kSparseCsr:
    case at::kSparseBsr:
      add_tensor(tensor.crow_indices(), may_be_saved);
      add_tensor(tensor.col_indices(), may_be_saved);
      add_tensor(tensor.values(), may_be_saved);
      return;
    case at::kSparseCsc:
    case at::kSparseBsc:
      add_tensor(tensor.ccol_indices(), may_be_saved);
      add_tensor(tensor.row_indices(), may_be_saved);
      add_tensor(tensor.values(), may_be_saved);
      return;
    default:
      break;
  }
  if (C10_UNLIKELY(!device.is_cuda())) {
    others_.push_back(THPVariable_Wrap(tensor));
    return;
  }
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (C10_UNLIKELY(!impl->has_storage())) {
    foreign_.push_back(tensor);
    return;
  }
  const c10::DataPtr& data = impl->unsafe_storage()
                                 .unsafeGetStorageImpl()
                                 ->_mutable_data_ptr_no_checks();
  if (data.get() == nullptr) {
    return;
  }
  if (C10_UNLIKELY(!is_ours(data))) {
    foreign_.push_back(tensor);
    return;
  }
  auto& blocks = may_be_saved ? until_free_ : precise_;
  blocks.push_back({data.get(), device.index()});
}

bool Gathering::may_be_saved(
    PyObject* object,
    const at::Tensor& tensor,
    Py_ssize_t references) const {
  if (saved_ != Saved::ask_tensor) {
    return saved_ == Saved::yes;
  }
  if (!at::GradMode::is_enabled() || tensor.is_inference()) {
    return false;
  }
#ifdef Py_GIL_DISABLED
  // Reference counts are split between threads there and say too little.
  (void)object;
  (void)references;
  return true;
#else
  const auto* impl = tensor.unsafeGetTensorImpl();
  const bool callers_alone = Py_REFCNT(object) <= references &&
      tensor.use_count() == 1 && impl->has_storage() &&
      impl->unsafe_storage().use_count() == 1;
  return !callers_alone;
#endif
}

void Gathering::mark(const End& end) {
  if (end.stream_object != Py_None && !end.stream) {
    TORCH_CHECK_VALUE(
        precise_.empty() && until_free_.empty() && foreign_.empty(),
        "a CUDA tensor cannot be marked on a stream of another kind of device");
  }
  if (!precise_.empty() || !until_free_.empty() || !foreign_.empty()) {
    pybind11::gil_scoped_release no_gil;
    mark_precise(precise_, end);
    mark_until_free(until_free_, end);
    for (const at::Tensor& tensor : foreign_) {
      mark_foreign(tensor, end);
    }
  }
  if (!others_.empty()) {
    Reference helper(python_helper("_record_stream"));
    for (PyObject* other : others_) {
      Reference done(
          helper ? PyObject_CallFunctionObjArgs(
                       helper.get(), other, end.stream_object, nullptr)
                 : nullptr);
      if (!done) {
        throw python_error();
      }
    }
  }
}

const char record_use_doc[] =
    "record_use(tensors, stream=None, *, event=None, gate=True)\n"
    "--\n\n"
    "Mark the end of use of `tensors` on `stream`. See esper_alloc.use.";

PyObject* record_use(
    PyObject* /*module*/,
    PyObject* const* args,
    Py_ssize_t count,
    PyObject* names) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count <= 2,
      "record_use() takes at most 2 positional arguments, not ",
      count);
  PyObject* tensors = count > 0 ? args[0] : nullptr;
  PyObject* stream = count > 1 ? args[1] : Py_None;
  PyObject* event = Py_None;
  PyObject* gate = Py_True;
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
    if (name == nullptr) {
      throw python_error();
    }
    PyObject* value = args[count + i];
    const std::string_view key(name);
    if (key == "stream" && count < 2) {
      stream = value;
    } else if (key == "event") {
      event = value;
    } else if (key == "gate") {
      gate = value;
    } else if (key == "tensors" && count < 1) {
      tensors = value;
    } else {
      TORCH_CHECK_TYPE(
          false, "record_use() got an unexpected argument '", name, "'");
    }
  }
  TORCH_CHECK_TYPE(tensors != nullptr, "record_use() needs tensors to mark");

  End end;
  end.stream_object = stream;
  if (stream != Py_None) {
    end.stream = unwrap_stream(stream);
  }
  if (event != Py_None) {
    end.event = unwrap_event(event);
  }
  const int truth = PyObject_IsTrue(gate);
  if (truth < 0) {
    throw python_error();
  }
  end.gate = truth != 0;

  Gathering found(Saved::ask_tensor);
  found.add_argument(tensors, references_of_argument);
  found.mark(end);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace esper
