// The normalisers' operators, and the functions that eager code calls instead.
//   esper_alloc::normalizer_update_  merges a batch into a state
//   esper_alloc::normalizer_apply    normalises by a state, or undoes it
//   esper_alloc::normalizer_step_    both, in that order and in one launch
//
// normalize.h explains state, mask and weights. A momentum below 0 means none.
#include "normalize_op.h"

#include <atomic>

#include <ATen/core/Tensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include "device.h"
#include "normalize_cpu.h"

namespace esper
{
namespace
{

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct State {
  const Tensor &moments;
  const Tensor &mean;
  const Tensor &variance;
  const Tensor *count; // null if the state is not updated
};

at::ScalarType result_type(at::ScalarType type)
{
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

bool is_supported(at::ScalarType type)
{
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

esper_value_type value_type(at::ScalarType type)
{
  switch (type) {
  case at::kDouble: return ESPER_DOUBLE;
  case at::kHalf: return ESPER_HALF;
  case at::kBFloat16: return ESPER_BFLOAT16;
  default: return ESPER_FLOAT;
  }
}

bool ends_with(at::IntArrayRef sizes, at::IntArrayRef tail)
{
  return sizes.size() >= tail.size() && sizes.slice(sizes.size() - tail.size()) == tail;
}

int64_t leading(at::IntArrayRef sizes, size_t trailing)
{
  int64_t product = 1;
  for (size_t i = 0; i + trailing < sizes.size(); i++) {
    product *= sizes[i];
  }
  return product;
}

// Checks everything that the kernels rely on.
void check(const State &state, const Tensor &x)
{
  const auto fits = [&](const Tensor &one, at::ScalarType type, int64_t count) {
    return one.scalar_type() == type && one.numel() == count && one.is_contiguous() &&
           one.device() == x.device();
  };
  const int64_t features = state.mean.numel();
  TORCH_CHECK(
      fits(state.moments, at::kDouble, 3 * features) && fits(state.mean, at::kFloat, features) &&
          fits(state.variance, at::kFloat, features) &&
          (state.count == nullptr || fits(*state.count, at::kLong, 1)),
      "esper_alloc: a normaliser's state must be dense, on the device of the values: moments "
      "(3 x features, float64), mean and variance (features, float32), count (int64)");
  TORCH_CHECK(is_supported(x.scalar_type()),
              "esper_alloc: a normaliser takes float32, float64, float16 or bfloat16, not ",
              x.scalar_type());
  TORCH_CHECK(ends_with(x.sizes(), state.mean.sizes()), "esper_alloc: values of shape ", x.sizes(),
              " must end with the normaliser's shape ", state.mean.sizes());
}

esper_normalizer_state state_of(const State &state)
{
  return {state.moments.mutable_data_ptr<double>(), state.mean.mutable_data_ptr<float>(),
          state.variance.mutable_data_ptr<float>(),
          state.count != nullptr ? state.count->mutable_data_ptr<int64_t>() : nullptr,
          state.mean.numel()};
}

esper_normalizer_batch batch_of(const State &state, const Tensor &dense)
{
  esper_normalizer_batch batch{};
  batch.values = dense.const_data_ptr();
  batch.type = value_type(dense.scalar_type());
  batch.rows = leading(dense.sizes(), state.mean.dim());
  return batch;
}

// Whether there is one for each value, or else one for each row. Raises if the shape or the device
// is wrong.
bool one_each(const Tensor &given, const Tensor &x, const State &state, const char *name)
{
  const auto rows = x.sizes().slice(0, x.dim() - state.mean.dim());
  const bool each = given.sizes() == x.sizes();
  TORCH_CHECK((each || given.sizes() == rows) && given.device() == x.device(),
              "esper_alloc: ", name, " has shape ", given.sizes(), " on ", given.device(),
              "; give one for each row, ", rows, ", or one for each value, ", x.sizes(), ", on ",
              x.device());
  return each;
}

// Keeps alive what the launch needs.
struct Selection {
  Tensor mask, weights;

  Selection(esper_normalizer_batch &batch, const State &state, const Tensor &x,
            const OptionalTensor &given_mask, const OptionalTensor &given_weights)
  {
    if (given_mask) {
      TORCH_CHECK(given_mask->scalar_type() == at::kBool, "esper_alloc: the mask is of ",
                  given_mask->scalar_type(), "; use booleans, true for each value that counts");
      batch.mask_each = one_each(*given_mask, x, state, "the mask");
      mask = given_mask->contiguous();
      batch.mask = static_cast<const unsigned char *>(mask.const_data_ptr());
    }
    if (given_weights) {
      batch.weights_each = one_each(*given_weights, x, state, "the tensor of weights");
      weights = given_weights->to(at::kDouble).contiguous();
      batch.weights = weights.const_data_ptr<double>();
    }
  }
};

void update_on_device(const esper_normalizer_state &state, const esper_normalizer_batch &batch,
                      const esper_normalizer_rule &rule, const Tensor &x, void *out)
{
  if (!x.is_cuda()) {
    normalizer_update_cpu(state, batch, rule, out);
    return;
  }
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  const size_t wanted = esper_normalizer_scratch(&state, &batch);
  Tensor scratch;
  if (wanted > 0) {
    scratch = at::detail::empty_cuda({static_cast<int64_t>(wanted)}, at::kDouble, x.device(),
                                     std::nullopt);
  }
  C10_CUDA_CHECK(esper_normalizer_update(&state, &batch, &rule, out,
                                         wanted > 0 ? scratch.mutable_data_ptr<double>() : nullptr,
                                         c10::cuda::getCurrentCUDAStream()));
}

void apply_on_device(const esper_normalizer_state &state, const esper_normalizer_batch &batch,
                     const esper_normalizer_rule &rule, const Tensor &x, void *out)
{
  if (!x.is_cuda()) {
    normalizer_apply_cpu(state, batch, rule, out);
    return;
  }
  const c10::cuda::OptionalCUDAGuard guard(x.device());
  C10_CUDA_CHECK(
      esper_normalizer_apply(&state, &batch, &rule, out, c10::cuda::getCurrentCUDAStream()));
}

Tensor result_for(const Tensor &x)
{
  const at::ScalarType type = result_type(x.scalar_type());
  if (x.is_cuda()) {
    return at::detail::empty_cuda(x.sizes(), type, x.device(), std::nullopt);
  }
  return at::empty(x.sizes(), x.options().dtype(type));
}

void update(const Tensor &moments, const Tensor &mean, const Tensor &variance, const Tensor &count,
            const Tensor &x, const OptionalTensor &mask, const OptionalTensor &weights,
            double momentum, double warm_up)
{
  const State state{moments, mean, variance, &count};
  check(state, x);
  const Tensor dense = x.contiguous();
  esper_normalizer_batch batch = batch_of(state, dense);
  const Selection selection(batch, state, x, mask, weights);
  const esper_normalizer_rule rule{momentum, warm_up, 0.0, 0.0, ESPER_CENTERED, 0};
  update_on_device(state_of(state), batch, rule, dense, nullptr);
}

Tensor apply(const Tensor &moments, const Tensor &mean, const Tensor &variance, const Tensor &x,
             double warm_up, double epsilon, double clip, int64_t scaling, bool inverse)
{
  const State state{moments, mean, variance, nullptr};
  check(state, x);
  const Tensor dense = x.contiguous();
  const esper_normalizer_rule rule{
      -1.0, warm_up, epsilon, clip, static_cast<esper_scaling>(scaling), inverse};
  Tensor out = result_for(dense);
  apply_on_device(state_of(state), batch_of(state, dense), rule, dense, out.mutable_data_ptr());
  return out;
}

Tensor step(const Tensor &moments, const Tensor &mean, const Tensor &variance, const Tensor &count,
            const Tensor &x, const OptionalTensor &mask, const OptionalTensor &weights,
            double momentum, double warm_up, double epsilon, double clip, int64_t scaling)
{
  const State state{moments, mean, variance, &count};
  check(state, x);
  const Tensor dense = x.contiguous();
  esper_normalizer_batch batch = batch_of(state, dense);
  const Selection selection(batch, state, x, mask, weights);
  const esper_normalizer_rule rule{
      momentum, warm_up, epsilon, clip, static_cast<esper_scaling>(scaling), 0};
  Tensor out = result_for(dense);
  update_on_device(state_of(state), batch, rule, dense, out.mutable_data_ptr());
  return out;
}

// --- what a trace sees: the results' shapes, and nothing done ---------------------

Tensor result_meta(const Tensor &x)
{
  return at::empty_symint(x.sym_sizes(), x.options().dtype(result_type(x.scalar_type())));
}

void update_meta(const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                 const OptionalTensor &, const OptionalTensor &, double, double)
{
}

Tensor apply_meta(const Tensor &, const Tensor &, const Tensor &, const Tensor &x, double, double,
                  double, int64_t, bool)
{
  return result_meta(x);
}

Tensor step_meta(const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &x,
                 const OptionalTensor &, const OptionalTensor &, double, double, double, double,
                 int64_t)
{
  return result_meta(x);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(esper_alloc, library)
{
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  library.def("normalizer_update_(Tensor(a!) moments, Tensor(b!) mean, Tensor(c!) variance, "
              "Tensor(d!) count, Tensor x, Tensor? mask, Tensor? weights, float momentum, "
              "float warm_up) -> ()",
              tags);
  library.def("normalizer_apply(Tensor moments, Tensor mean, Tensor variance, Tensor x, "
              "float warm_up, float epsilon, float clip, int scaling, bool inverse) -> Tensor",
              tags);
  library.def("normalizer_step_(Tensor(a!) moments, Tensor(b!) mean, Tensor(c!) variance, "
              "Tensor(d!) count, Tensor x, Tensor? mask, Tensor? weights, float momentum, "
              "float warm_up, float epsilon, float clip, int scaling) -> Tensor",
              tags);
}

TORCH_LIBRARY_IMPL(esper_alloc, CPU, library)
{
  library.impl("normalizer_update_", update);
  library.impl("normalizer_apply", apply);
  library.impl("normalizer_step_", step);
}

TORCH_LIBRARY_IMPL(esper_alloc, CUDA, library)
{
  library.impl("normalizer_update_", update);
  library.impl("normalizer_apply", apply);
  library.impl("normalizer_step_", step);
}

TORCH_LIBRARY_IMPL(esper_alloc, Meta, library)
{
  library.impl("normalizer_update_", update_meta);
  library.impl("normalizer_apply", apply_meta);
  library.impl("normalizer_step_", step_meta);
}

// For gradients the modules compose differentiable operations. An operator that is asked for one
// must raise rather than give a wrong result.
TORCH_LIBRARY_IMPL(esper_alloc, Autograd, library)
{
  for (const char *name : {"normalizer_update_", "normalizer_apply", "normalizer_step_"}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

// --- eager calls ------------------------------------------------------------------

namespace
{

// Whether nothing stands between Python and a plain tensor's memory. Otherwise the Python code
// takes the slower way through the operators.
bool is_plain(PyObject *object)
{
  static const c10::DispatchKeySet extra({
      c10::DispatchKey::Python,
      c10::DispatchKey::PythonTLSSnapshot,
      c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchVmapMode,
      c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
      c10::DispatchKey::FuncTorchDynamicLayerBackMode,
      c10::DispatchKey::Functionalize,
      c10::DispatchKey::Conjugate,
      c10::DispatchKey::Negative,
      c10::DispatchKey::ZeroTensor,
      c10::DispatchKey::Batched,
      c10::DispatchKey::VmapMode,
      c10::DispatchKey::NestedTensor,
      c10::DispatchKey::Tracer, // of torch.jit.trace
  });
  if (!THPVariable_CheckExact(object)) {
    return false;
  }
  const Tensor &tensor = THPVariable_Unpack(object);
  const auto keys = tensor.key_set() | c10::impl::tls_local_dispatch_key_set().included_;
  return (keys & extra).empty() && tensor.layout() == at::kStrided;
}

// Devices that can run the kernels, as normalizer_allow() was told.
std::atomic<bool> allowed[C10_COMPILE_TIME_MAX_GPUS];

// Whether `x` may go straight to the kernels. Anything unusual takes the slower way, which has the
// error messages. So does `x` on a GPU where operators are observed: automatic uses and the auditor
// have to see it.
bool may_go_straight(const State &state, const Tensor &x)
{
  const at::Device device = x.device();
  if (device.is_cuda() ? !allowed[device.index()] || at::hasCallbacks() : !device.is_cpu()) {
    return false;
  }
  return state.mean.device() == device && is_supported(x.scalar_type()) &&
         !(x.requires_grad() && at::GradMode::is_enabled()) &&
         ends_with(x.sizes(), state.mean.sizes()) && !at::impl::torch_function_mode_enabled() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

void bump_versions(const State &state)
{
  for (const Tensor *one : {&state.moments, &state.mean, &state.variance, state.count}) {
    one->unsafeGetTensorImpl()->bump_version();
  }
}

// Handles a single number with a state of one feature on the CPU, which is how rewards come.
PyObject *step_number(const State &state, double x, const esper_normalizer_rule &rule)
{
  esper_normalizer_batch batch{};
  batch.values = &x;
  batch.type = ESPER_DOUBLE;
  batch.rows = 1;
  double result = 0.0;
  normalizer_update_cpu(state_of(state), batch, rule, &result);
  bump_versions(state);
  return PyFloat_FromDouble(result);
}

PyObject *normalizer_step(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 11, "normalizer_step takes 11 arguments, not ", count);
  const bool is_number = PyFloat_CheckExact(args[4]);
  for (int i = 0; i < 5; i++) {
    if (!is_plain(args[i]) && !(i == 4 && is_number)) {
      Py_RETURN_NOTIMPLEMENTED;
    }
  }
  const State state{THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]),
                    THPVariable_Unpack(args[2]), &THPVariable_Unpack(args[3])};
  // The moments stand in for a number: they are float64, too, and on the right device.
  const Tensor &x = is_number ? state.moments : THPVariable_Unpack(args[4]);
  if (!may_go_straight(state, x) || (is_number && !(x.is_cpu() && state.mean.numel() == 1))) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const double momentum = args[5] == Py_None ? -1.0 : PyFloat_AsDouble(args[5]);
  const double warm_up = PyFloat_AsDouble(args[6]);
  const double epsilon = PyFloat_AsDouble(args[7]);
  const double clip = PyFloat_AsDouble(args[8]);
  const long scaling = PyLong_AsLong(args[9]);
  const bool wants_result = args[10] == Py_True;
  if (PyErr_Occurred()) {
    return nullptr;
  }
  const esper_normalizer_rule rule{
      momentum, warm_up, epsilon, clip, static_cast<esper_scaling>(scaling), 0};
  check(state, x);
  if (is_number) {
    return step_number(state, PyFloat_AS_DOUBLE(args[4]), rule);
  }
  Tensor out;
  {
    const pybind11::gil_scoped_release no_gil;
    RECORD_FUNCTION("esper_alloc::normalizer_step_", c10::ArrayRef<const c10::IValue>{});
    const c10::MaybeOwned<Tensor> dense = x.expect_contiguous();
    if (wants_result) {
      out = result_for(*dense);
    }
    update_on_device(state_of(state), batch_of(state, *dense), rule, *dense,
                     wants_result ? out.mutable_data_ptr() : nullptr);
    bump_versions(state);
  }
  if (!wants_result) {
    Py_RETURN_NONE;
  }
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

PyObject *normalizer_apply(PyObject * /*module*/, PyObject *const *args, Py_ssize_t count)
{
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 9, "normalizer_apply takes 9 arguments, not ", count);
  for (int i = 0; i < 4; i++) {
    if (!is_plain(args[i])) {
      Py_RETURN_NOTIMPLEMENTED;
    }
  }
  const State state{THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]),
                    THPVariable_Unpack(args[2]), nullptr};
  const Tensor &x = THPVariable_Unpack(args[3]);
  if (!may_go_straight(state, x)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const double warm_up = PyFloat_AsDouble(args[4]);
  const double epsilon = PyFloat_AsDouble(args[5]);
  const double clip = PyFloat_AsDouble(args[6]);
  const long scaling = PyLong_AsLong(args[7]);
  const bool inverse = args[8] == Py_True;
  if (PyErr_Occurred()) {
    return nullptr;
  }
  Tensor out;
  {
    const pybind11::gil_scoped_release no_gil;
    RECORD_FUNCTION("esper_alloc::normalizer_apply", c10::ArrayRef<const c10::IValue>{});
    out = apply(state.moments, state.mean, state.variance, x, warm_up, epsilon, clip, scaling,
                inverse);
  }
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

PyObject *normalizer_allow(PyObject * /*module*/, PyObject *index)
{
  HANDLE_TH_ERRORS
  const long device = PyLong_AsLong(index);
  if (device == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  TORCH_CHECK_INDEX(device >= 0 && device < C10_COMPILE_TIME_MAX_GPUS,
                    "there is no such device: ", device);
  allowed[device] = true;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

template <class Function>
PyCFunction method(Function *function)
{
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

} // namespace

PyMethodDef normalize_methods[] = {
    {"normalizer_step", method(&normalizer_step), METH_FASTCALL,
     "The operators normalizer_step_ and normalizer_update_ for plain tensors, and for "
     "one float; NotImplemented for anything else, with nothing done."},
    {"normalizer_apply", method(&normalizer_apply), METH_FASTCALL,
     "The operator normalizer_apply, in the same way."},
    {"normalizer_allow", normalizer_allow, METH_O,
     "Lets the two above serve a CUDA device: its kernels run there."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace esper
