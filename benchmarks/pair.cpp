// The measuring loops of pair.py and record_use_cost.py, which also call esper_alloc's C
// interface.
#include "loops.h"

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <stdexcept>

#include "../csrc/python/capi.h"

namespace
{

// One allocation and its free, nothing between: ns for a pair.
double pair_ns(size_t size, long count)
{
  const auto begin = Clock::now();
  for (long i = 0; i < count; i++)
    allocator::raw_delete(allocator::raw_alloc(size));
  return nanoseconds_since(begin) / double(count);
}

// The same as a tensor does it.
double data_pointer_ns(size_t size, long count)
{
  auto *current = allocator::get();
  const auto begin = Clock::now();
  for (long i = 0; i < count; i++)
    c10::DataPtr dropped = current->allocate(size);
  return nanoseconds_since(begin) / double(count);
}

// Re-recording one event on an idle stream: the driver's price of a mark.
double event_record_ns(long count)
{
  auto stream = c10::cuda::getStreamFromPool(false, 0);
  cudaEvent_t event;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  for (int i = 0; i < 100; i++)
    C10_CUDA_CHECK(cudaEventRecord(event, stream));
  const auto begin = Clock::now();
  for (long i = 0; i < count; i++)
    C10_CUDA_CHECK(cudaEventRecord(event, stream));
  const double result = nanoseconds_since(begin) / double(count);
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  C10_CUDA_CHECK(cudaEventDestroy(event));
  return result;
}

void must(const esper_capi *esper, esper_status status)
{
  if (status != ESPER_OK)
    throw std::runtime_error(esper->last_error());
}

// ns a call of `body`, over `count` calls that begin with an idle stream.
template <typename Body>
double timed(cudaStream_t stream, long count, Body body)
{
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  const auto begin = Clock::now();
  for (long i = 0; i < count; i++)
    body();
  return nanoseconds_since(begin) / double(count);
}

enum { BARE, PUBLIC, IMMORTAL, LIST, COSTS };
using Costs = std::array<double, COSTS>;

// A mark in C beside the driver's record, by turns in one process, each round's ns:
// BARE a bare cuEventRecord; PUBLIC esper_alloc_record_use, which knows nothing of
// the stream; IMMORTAL esper_record_use on a stream that lives for ever, as the
// PyTorch part calls it; LIST the same for eight blocks at once.
std::vector<Costs> mark_costs(const esper_capi *esper, long rounds, long count)
{
  auto side = c10::cuda::getStreamFromPool(false, 0);
  using record_function = int (*)(cudaEvent_t, cudaStream_t);
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  auto record =
      reinterpret_cast<record_function>(library ? dlsym(library, "cuEventRecord") : nullptr);
  if (!record)
    throw std::runtime_error("libcuda.so.1 has no cuEventRecord");
  cudaEvent_t event;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  esper_core *core = esper->instance();
  const esper_stream stream{side.stream(), 0, ESPER_STREAM_IMMORTAL};
  std::array<const void *, 8> blocks;
  for (auto &block : blocks)
    block = allocator::raw_alloc(4096);
  auto round = [&](long calls) {
    Costs costs;
    costs[BARE] = timed(side, calls, [&] {
      if (record(event, side.stream()))
        throw std::runtime_error("cuEventRecord failed");
    });
    costs[PUBLIC] =
        timed(side, calls, [&] { must(esper, esper->alloc_record_use(blocks[0], side.stream())); });
    costs[IMMORTAL] = timed(side, calls, [&] {
      must(esper, esper->record_use(core, blocks.data(), 1, stream, 0, nullptr));
    });
    costs[LIST] = timed(side, calls, [&] {
      must(esper, esper->record_use(core, blocks.data(), 8, stream, 0, nullptr));
    });
    return costs;
  };
  round(count / 10 + 1);
  std::vector<Costs> found;
  for (long i = 0; i < rounds; i++)
    found.push_back(round(count));
  C10_CUDA_CHECK(cudaStreamSynchronize(side));
  for (auto block : blocks)
    allocator::raw_delete(const_cast<void *>(block));
  C10_CUDA_CHECK(cudaEventDestroy(event));
  return found;
}

// Allocate, mark for another stream, free: ns a step.
double steady_ns(const esper_capi *esper, long count)
{
  // The same one each time: what a stream needs is made when it is first used.
  static const auto side = c10::cuda::getStreamFromPool(false, 0);
  const esper_stream stream{side.stream(), 0, ESPER_STREAM_IMMORTAL};
  esper_core *core = esper->instance();
  const auto begin = Clock::now();
  for (long i = 0; i < count; i++) {
    void *block = allocator::raw_alloc(4096);
    const void *address = block;
    must(esper, esper->record_use(core, &address, 1, stream, 0, nullptr));
    allocator::raw_delete(block);
  }
  return nanoseconds_since(begin) / double(count);
}

// What `measure` returns, as Python's float.
template <typename Measure>
PyObject *measured(Measure measure)
{
  double result = 0;
  return without_gil([&] { result = measure(); }) ? PyFloat_FromDouble(result) : nullptr;
}

// Of a function of a size and a count.
template <double (*measure)(size_t, long)>
PyObject *py_sized_ns(PyObject *, PyObject *args)
{
  Py_ssize_t size;
  long count;
  if (!PyArg_ParseTuple(args, "nl", &size, &count))
    return nullptr;
  return measured([=] { return measure(size_t(size), count); });
}

PyObject *py_event_record_ns(PyObject *, PyObject *args)
{
  long count;
  if (!PyArg_ParseTuple(args, "l", &count))
    return nullptr;
  return measured([=] { return event_record_ns(count); });
}

PyObject *py_mark_costs(PyObject *, PyObject *args)
{
  long rounds, count;
  if (!PyArg_ParseTuple(args, "ll", &rounds, &count))
    return nullptr;
  const esper_capi *esper = esper_capi_import();
  if (!esper)
    return nullptr;
  std::vector<Costs> found;
  if (!without_gil([&] { found = mark_costs(esper, rounds, count); }))
    return nullptr;
  return list_of(found, [](const Costs &costs) {
    return Py_BuildValue("dddd", costs[BARE], costs[PUBLIC], costs[IMMORTAL], costs[LIST]);
  });
}

PyObject *py_steady_ns(PyObject *, PyObject *args)
{
  long count;
  if (!PyArg_ParseTuple(args, "l", &count))
    return nullptr;
  const esper_capi *esper = esper_capi_import();
  if (!esper)
    return nullptr;
  return measured([=] { return steady_ns(esper, count); });
}

PyMethodDef methods[] = {
    {"pair_ns", py_sized_ns<pair_ns>, METH_VARARGS, "pair_ns(size, count) -> ns a pair"},
    {"data_pointer_ns", py_sized_ns<data_pointer_ns>, METH_VARARGS,
     "data_pointer_ns(size, count) -> ns to allocate a DataPtr and drop it"},
    {"event_record_ns", py_event_record_ns, METH_VARARGS, "event_record_ns(count) -> ns a record"},
    {"mark_costs", py_mark_costs, METH_VARARGS,
     "mark_costs(rounds, count) -> [(cuEventRecord, esper_alloc_record_use, esper_record_use, "
     "the same of eight)], ns a call"},
    {"steady_ns", py_steady_ns, METH_VARARGS, "steady_ns(count) -> ns to allocate, mark and free"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "pair_loops", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_pair_loops()
{
  return PyModule_Create(&module);
}
