// The module esper_alloc._kernels: the helpers' CUDA kernels and their operators, built for one
// minor version of torch. esper_alloc/helpers/kernels.py loads it, and refuses to with another
// version. README.md lists the files.
#include <torch/csrc/Exceptions.h>
#include <torch/version.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "device.h"
#include "methods.h"

#define ESPER_TEXT_(x) #x
#define ESPER_TEXT(x) ESPER_TEXT_(x)

namespace
{

PyObject *built_for(PyObject * /*module*/, PyObject * /*none*/)
{
  return PyUnicode_FromString(ESPER_TEXT(TORCH_VERSION_MAJOR) "." ESPER_TEXT(TORCH_VERSION_MINOR));
}

PyObject *runs_on(PyObject * /*module*/, PyObject *index)
{
  HANDLE_TH_ERRORS
  const long device = PyLong_AsLong(index);
  if (device == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const cudaError_t error = esper_kernels_run_here();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    Py_RETURN_FALSE;
  }
  C10_CUDA_CHECK(error);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {{"built_for", built_for, METH_NOARGS,
                          "The torch version, major.minor, that this module was built for."},
                         {"runs_on", runs_on, METH_O,
                          "Whether a CUDA device, by its index, can run what was compiled here."},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "esper_alloc._kernels",
                          "The helpers' CUDA kernels.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

} // namespace

PyMODINIT_FUNC PyInit__kernels()
{
  PyObject *module = PyModule_Create(&definition);
  for (PyMethodDef *more : esper::helper_methods()) {
    if (module != nullptr && PyModule_AddFunctions(module, more) != 0) {
      Py_CLEAR(module);
    }
  }
  return module;
}
