#include "saving.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/AutogradState.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/python_headers.h>

#include <frameobject.h>

#include <atomic>

#include "python_objects.h"

namespace esper
{
namespace
{

// The code of torch.autograd.Function.apply(), which calls the forward of every custom function.
// None if it is not written in Python. Kept for ever. To be called with the GIL, which an import
// may release.
PyObject *code_of_apply()
{
  static std::atomic<PyObject *> known{nullptr};
  PyObject *code = known.load(std::memory_order_acquire);
  if (code == nullptr) {
    const auto apply = pybind11::module_::import("torch.autograd").attr("Function").attr("apply");
    const auto function = pybind11::getattr(apply, "__func__", pybind11::none());
    code = pybind11::getattr(function, "__code__", pybind11::none()).release().ptr();
    known.store(code, std::memory_order_release);
  }
  return code;
}

// Whether the forward of a custom function is among the calls of this thread.
bool in_forward()
{
  const pybind11::gil_scoped_acquire gil;
  PyObject *apply = code_of_apply();
  PyFrameObject *frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  bool found = apply == Py_None; // it cannot be told, so it may
  while (frame != nullptr && !found) {
    const Reference running(reinterpret_cast<PyObject *>(frame));
    const Reference code(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame)));
    found = code.get() == apply;
    frame = PyFrame_GetBack(frame);
  }
  Py_XDECREF(frame);
  return found;
}

} // namespace

bool in_backward()
{
  return torch::autograd::get_current_graph_task_id() != -1;
}

MaySave MaySave::everything()
{
  return MaySave(Kind::everything);
}

// That hooks are set tells a hook that packs. That forward-mode AD is off tells forward: only it
// and inference mode turn it off.
MaySave MaySave::itself()
{
  const auto &state = c10::AutogradState::get_tls_state();
  const auto &hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  if (!state.get_grad_mode() && !hooks.empty()) {
    return everything();
  }
  if (state.get_fw_grad_mode()) {
    return MaySave(Kind::nothing);
  }
  return MaySave(state.get_inference_mode() ? Kind::forward : Kind::everything);
}

bool MaySave::operator()(const at::Tensor *tensor) const
{
  if (kind_ != Kind::forward) {
    return kind_ == Kind::everything;
  }
  // Autograd refuses to save inference tensors.
  return (tensor == nullptr || !tensor->is_inference()) && in_forward();
}

} // namespace esper
