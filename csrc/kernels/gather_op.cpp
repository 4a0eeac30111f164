// The gatherer of one device. It has the columns of a data set and an epoch's order. One call
// allocates the tensors of all environments, launches the kernel and records the event after which
// they are ready. esper_alloc/helpers/gather/compiled.py drives it and checks the user's arguments.
//
// It is a plain CPython object and not an operator, because a batch of 64 environments has 128 new
// tensors, and the dispatcher's cost for each would show.
#include "gather_op.h"

#include <ATen/Functions.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/strides.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/cuda/Event.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "gather.h"

namespace esper
{
namespace
{

// A column of the data set, and the layout of its batches.
struct Column {
  at::Tensor source;
  std::optional<at::Tensor> constants;
  at::ScalarType type;
  c10::MemoryFormat format;
  std::vector<int64_t> sizes; // of a batch; the first is set for each environment
  c10::DimVector strides;     // the same for every batch size
  int64_t row_bytes;          // of the result
  esper_gather_column description;
};

// A tensor in new memory, as from at::empty(), but with known sizes and strides: computing them for
// a hundred tensors takes noticeable time.
at::Tensor fresh(Column &column, int64_t rows, c10::Allocator *allocator)
{
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                            rows * column.row_bytes, allocator, /*resizable=*/true);
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                               c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                               c10::scalarTypeToTypeMeta(column.type));
  column.sizes[0] = rows;
  made.unsafeGetTensorImpl()->set_sizes_and_strides(column.sizes, column.strides);
  return made;
}

// A new tensor over another's memory, as from detach(). It shares the version counter but nothing
// that was done to earlier tensors over it, such as a gradient.
at::Tensor renewed(const at::Tensor &memory)
{
  const c10::TensorImpl *impl = memory.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/false));
}

class Gatherer
{
public:
  Gatherer(std::vector<Column> columns, PyTypeObject *event_type)
      : columns_(std::move(columns)), event_type_(event_type),
        device_(columns_.at(0).source.get_device())
  {
    Py_INCREF(event_type_);
    for (const Column &column : columns_) {
      descriptions_.push_back(column.description);
    }
  }
  ~Gatherer()
  {
    for (PyObject *event : events_) {
      Py_DECREF(event);
    }
    Py_DECREF(event_type_);
  }
  Gatherer(const Gatherer &) = delete;
  Gatherer &operator=(const Gatherer &) = delete;

  void start(std::optional<at::Tensor> order, int64_t offset, uint64_t seed)
  {
    order_ = std::move(order);
    offset_ = offset;
    seed_ = seed;
  }

  // New references to the list of tuples and to the event. Null with an exception set.
  PyObject *gather(int64_t start, uint32_t environments, uint32_t size, uint32_t larger,
                   PyObject *into);

private:
  bool fill(uint32_t environments, uint32_t size, uint32_t larger, PyObject *memory,
            PyObject *list);
  at::Tensor taken(PyObject *memory, uint32_t env, size_t column, int64_t rows);
  void launch(int64_t start, uint32_t environments, uint32_t size, uint32_t larger,
              const c10::cuda::CUDAStream &stream);
  PyObject *idle_event();

  // Events kept for later batches, as many as the batches that a consumer usually holds.
  static constexpr size_t kEvents = 4;

  std::vector<Column> columns_;
  std::vector<esper_gather_column> descriptions_;
  std::vector<void *> destinations_;
  std::optional<at::Tensor> order_;
  int64_t offset_ = 0;
  uint64_t seed_ = 0;
  PyTypeObject *event_type_;
  std::vector<PyObject *> events_;
  c10::DeviceIndex device_;
};

// Fills the list with the tensors of every environment, in new memory or over that of the caller's
// tensors. False with an exception set.
bool Gatherer::fill(uint32_t environments, uint32_t size, uint32_t larger, PyObject *memory,
                    PyObject *list)
{
  c10::Allocator *allocator = c10::cuda::CUDACachingAllocator::get();
  for (uint32_t env = 0; env < environments; env++) {
    const int64_t rows = size + (env < larger ? 1 : 0);
    PyObject *entry = PyTuple_New(static_cast<Py_ssize_t>(columns_.size()));
    if (entry == nullptr) {
      return false;
    }
    PyList_SET_ITEM(list, env, entry);
    for (size_t i = 0; i < columns_.size(); i++) {
      at::Tensor tensor =
          memory == nullptr ? fresh(columns_[i], rows, allocator) : taken(memory, env, i, rows);
      destinations_.push_back(tensor.mutable_data_ptr());
      PyObject *wrapped = THPVariable_Wrap(std::move(tensor));
      if (wrapped == nullptr) {
        return false;
      }
      PyTuple_SET_ITEM(entry, static_cast<Py_ssize_t>(i), wrapped);
    }
  }
  return true;
}

// A new tensor over one of the caller's, which come as a list of tuples with a batch's shapes.
at::Tensor Gatherer::taken(PyObject *memory, uint32_t env, size_t column, int64_t rows)
{
  PyObject *entry = PyList_GET_ITEM(memory, env);
  TORCH_CHECK_TYPE(PyTuple_Check(entry) &&
                       PyTuple_GET_SIZE(entry) == static_cast<Py_ssize_t>(columns_.size()),
                   "an entry of into must be a tuple with a tensor for each column");
  PyObject *item = PyTuple_GET_ITEM(entry, static_cast<Py_ssize_t>(column));
  TORCH_CHECK_TYPE(THPVariable_Check(item), "into must contain tensors only");
  const at::Tensor &tensor = THPVariable_Unpack(item);
  TORCH_CHECK_VALUE(tensor.get_device() == device_ &&
                        tensor.scalar_type() == columns_[column].type && tensor.dim() > 0 &&
                        tensor.size(0) == rows && tensor.is_contiguous(columns_[column].format),
                    "a tensor of into must have the shape, dtype and device of its column");
  // So that a backward that saved the overwritten memory notices.
  tensor.unsafeGetTensorImpl()->bump_version();
  return renewed(tensor);
}

void Gatherer::launch(int64_t start, uint32_t environments, uint32_t size, uint32_t larger,
                      const c10::cuda::CUDAStream &stream)
{
  esper_gather_batch batch = {};
  batch.order = order_ ? order_->const_data_ptr<int64_t>() : nullptr;
  batch.start = start;
  batch.offset = offset_;
  batch.seed = seed_;
  batch.environments = environments;
  batch.size = size;
  batch.larger = larger;
  batch.columns = static_cast<uint32_t>(columns_.size());
  const size_t bytes = esper_gather_remote_bytes(batch.columns, environments);
  if (bytes == 0) {
    C10_CUDA_CHECK(esper_gather_launch(&batch, descriptions_.data(), destinations_.data(), nullptr,
                                       nullptr, stream.stream()));
    return;
  }
  const auto count = static_cast<int64_t>(bytes);
  const auto options = at::TensorOptions().dtype(at::kByte);
  at::Tensor staging = at::empty({count}, options.pinned_memory(true));
  at::Tensor remote = at::empty({count}, options.device(at::kCUDA, device_));
  C10_CUDA_CHECK(esper_gather_launch(&batch, descriptions_.data(), destinations_.data(),
                                     remote.mutable_data_ptr(), staging.mutable_data_ptr(),
                                     stream.stream()));
  // Keeps the memory from being reused before the copy is done.
  const c10::DataPtr &pinned = staging.storage().data_ptr();
  at::getHostAllocator(at::kCUDA)->record_event(pinned.get(), pinned.get_context(),
                                                stream.unwrap());
}

// A new reference to a torch.cuda.Event that nobody else has. Null with an exception set. Creating
// and destroying an event takes longer than recording it, so some are kept and reused once their
// batches are gone. A stream that already waits for one keeps waiting for what was recorded then.
PyObject *Gatherer::idle_event()
{
  for (PyObject *event : events_) {
    if (Py_REFCNT(event) == 1) {
      return Py_NewRef(event);
    }
  }
  PyObject *none = PyTuple_New(0);
  if (none == nullptr) {
    return nullptr;
  }
  // The Python class only adds defaults, which are those of its base.
  PyObject *event = event_type_->tp_base->tp_new(event_type_, none, nullptr);
  Py_DECREF(none);
  if (event != nullptr && events_.size() < kEvents) {
    events_.push_back(Py_NewRef(event));
  }
  return event;
}

PyObject *Gatherer::gather(int64_t start, uint32_t environments, uint32_t size, uint32_t larger,
                           PyObject *into)
{
  TORCH_CHECK_TYPE(into == nullptr || PyList_Check(into), "into must be a list");
  TORCH_CHECK_VALUE(into == nullptr || PyList_GET_SIZE(into) == environments,
                    "into must have an entry for each environment");
  const c10::cuda::CUDAGuard device(device_);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device_);
  // Batches are ordinary tensors, even if requested in inference mode.
  const c10::InferenceMode ordinary(false);
  destinations_.clear();
  THPObjectPtr list(PyList_New(environments));
  if (!list || !fill(environments, size, larger, into, list.get())) {
    return nullptr;
  }
  launch(start, environments, size, larger, stream);
  THPObjectPtr event(idle_event());
  if (!event) {
    return nullptr;
  }
  reinterpret_cast<THCPEvent *>(event.get())->cuda_event.record(stream);
  return PyTuple_Pack(2, list.get(), event.get());
}

// From (source, constants or None, dtype, channels_last, description).
// esper_alloc/helpers/gather/compiled.py makes these and checks what fits.
std::optional<Column> column_of(PyObject *item)
{
  PyObject *source, *constants, *type;
  int last;
  unsigned int kind, unit_bytes, row_units, source_type, result_type, source_last;
  unsigned int channels, height, width, crop, flip_threshold;
  if (!PyArg_ParseTuple(item, "OOOp(IIIIIIIIIII)", &source, &constants, &type, &last, &kind,
                        &unit_bytes, &row_units, &source_type, &result_type, &source_last,
                        &channels, &height, &width, &crop, &flip_threshold)) {
    return std::nullopt;
  }
  TORCH_CHECK_TYPE(THPVariable_Check(source) && THPDtype_Check(type),
                   "a column must have a tensor and a dtype");
  Column column = {};
  column.source = THPVariable_Unpack(source);
  TORCH_CHECK_VALUE(column.source.is_cuda() && column.source.dim() > 0 &&
                        column.source.is_non_overlapping_and_dense(),
                    "a column must be a dense CUDA tensor with a dimension of samples");
  esper_gather_column &d = column.description;
  if (constants != Py_None) {
    TORCH_CHECK_TYPE(THPVariable_Check(constants), "constants must be a tensor or None");
    column.constants = THPVariable_Unpack(constants);
    d.constants = column.constants->const_data_ptr<float>();
  }
  column.type = reinterpret_cast<THPDtype *>(type)->scalar_type;
  column.format = last ? c10::MemoryFormat::ChannelsLast : c10::MemoryFormat::Contiguous;
  column.sizes = column.source.sizes().vec();
  if (last) {
    column.strides = c10::get_channels_last_strides_2d(column.sizes);
  } else {
    column.strides = c10::contiguous_strides(column.sizes);
  }
  d.source = column.source.const_data_ptr();
  d.row_bytes = static_cast<int64_t>(column.source.element_size());
  for (size_t i = 1; i < column.sizes.size(); i++) {
    d.row_bytes *= column.sizes[i];
  }
  column.row_bytes = d.row_bytes / static_cast<int64_t>(column.source.element_size()) *
                     static_cast<int64_t>(c10::elementSize(column.type));
  d.kind = static_cast<uint8_t>(kind);
  d.unit_bytes = unit_bytes;
  d.row_units = esper_divisor_of(row_units);
  d.source_type = static_cast<uint8_t>(source_type);
  d.result_type = static_cast<uint8_t>(result_type);
  d.source_last = static_cast<uint8_t>(source_last);
  d.result_last = last != 0;
  d.channels = esper_divisor_of(channels);
  d.height = esper_divisor_of(height);
  d.width = esper_divisor_of(width);
  d.crop = static_cast<int32_t>(crop);
  d.flip_threshold = flip_threshold;
  return column;
}

// The Python object

struct Object {
  PyObject_HEAD Gatherer *gatherer;
};

Gatherer &gatherer_of(PyObject *self)
{
  return *reinterpret_cast<Object *>(self)->gatherer;
}

PyObject *start(PyObject *self, PyObject *args)
{
  HANDLE_TH_ERRORS
  PyObject *order;
  long long offset;
  unsigned long long seed;
  if (!PyArg_ParseTuple(args, "OLK", &order, &offset, &seed)) {
    return nullptr;
  }
  std::optional<at::Tensor> tensor;
  if (order != Py_None) {
    TORCH_CHECK_TYPE(THPVariable_Check(order), "order must be a tensor or None");
    tensor = THPVariable_Unpack(order);
    TORCH_CHECK_VALUE(tensor->is_cuda() && tensor->scalar_type() == at::kLong &&
                          tensor->is_contiguous(),
                      "order must be a contiguous int64 tensor on the columns' device");
  }
  gatherer_of(self).start(std::move(tensor), offset, seed);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 5, "gather takes start, environments, size, larger and into");
  long long numbers[4];
  for (int i = 0; i < 4; i++) {
    numbers[i] = PyLong_AsLongLong(args[i]);
    if (numbers[i] == -1 && PyErr_Occurred()) {
      return nullptr;
    }
    TORCH_CHECK_VALUE(numbers[i] >= 0 && (i == 0 || numbers[i] < ESPER_GATHER_MAX_UNITS),
                      "start, environments, size or larger is out of range");
  }
  return gatherer_of(self).gather(numbers[0], static_cast<uint32_t>(numbers[1]),
                                  static_cast<uint32_t>(numbers[2]),
                                  static_cast<uint32_t>(numbers[3]),
                                  args[4] == Py_None ? nullptr : args[4]);
  END_HANDLE_TH_ERRORS
}

void deallocate(PyObject *self)
{
  PyTypeObject *type = Py_TYPE(self);
  delete reinterpret_cast<Object *>(self)->gatherer;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef object_methods[] = {
    {"start", start, METH_VARARGS,
     "start(order, offset, seed): begins an epoch. order: int64 on the device, or None; "
     "seed: mixed."},
    {"gather", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gather)), METH_FASTCALL,
     "gather(start, environments, size, larger, into): the list of tuples of tensors, and "
     "the event after which they are ready. into: tensors whose memory they take, or None."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(deallocate)},
                       {Py_tp_methods, object_methods},
                       {Py_tp_doc, const_cast<char *>(
                                       "The columns of a data set on one device, see gatherer().")},
                       {0, nullptr}};

PyType_Spec spec = {"esper_alloc._kernels.Gatherer", sizeof(Object), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyObject *gatherer(PyObject * /*module*/, PyObject *args)
{
  HANDLE_TH_ERRORS
  static PyObject *type = PyType_FromSpec(&spec);
  PyObject *list, *event_type;
  if (type == nullptr ||
      !PyArg_ParseTuple(args, "O!O!", &PyList_Type, &list, &PyType_Type, &event_type)) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(PyList_GET_SIZE(list) > 0, "no columns");
  std::vector<Column> columns;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    std::optional<Column> column = column_of(PyList_GET_ITEM(list, i));
    if (!column) {
      return nullptr;
    }
    columns.push_back(std::move(*column));
  }
  auto made =
      std::make_unique<Gatherer>(std::move(columns), reinterpret_cast<PyTypeObject *>(event_type));
  PyObject *object = PyType_GenericAlloc(reinterpret_cast<PyTypeObject *>(type), 0);
  if (object != nullptr) {
    reinterpret_cast<Object *>(object)->gatherer = made.release();
  }
  return object;
  END_HANDLE_TH_ERRORS
}

} // namespace

PyMethodDef gather_methods[] = {
    {"gatherer", gatherer, METH_VARARGS,
     "gatherer(columns, event_type): a Gatherer. columns: a list of (source, constants or "
     "None, dtype, channels_last, description)."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace esper
