// The measuring loop of malloc_times.py: runs a recorded job's allocations and frees
// and takes the time of each.
#include "loops.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace
{

// As esper_alloc/replay/operations.py packs them.
struct Operation {
  uint32_t code, slot, stream, pool;
  uint64_t size;
};
static_assert(sizeof(Operation) == 24);
enum : uint32_t { ALLOC, FREE, FREE_PENDING, DONE };

// ns, in order.
struct Times {
  std::vector<uint32_t> mallocs, frees;
};

uint32_t ns_since(Clock::time_point begin)
{
  const auto took = std::chrono::nanoseconds(Clock::now() - begin).count();
  return uint32_t(std::min<int64_t>(took, UINT32_MAX));
}

// Always the same ones, since memory that is there belongs to a stream.
const std::vector<c10::cuda::CUDAStream> &streams_of(size_t count)
{
  static std::vector<c10::cuda::CUDAStream> streams{c10::cuda::getDefaultCUDAStream()};
  while (streams.size() < count)
    streams.push_back(c10::cuda::getStreamFromPool(false, 0));
  return streams;
}

// What a stream of the job still used when it was freed is freed like the rest: the
// streams are idle here. What is left live at the end is freed, untimed.
Times measure(const std::vector<Operation> &operations, size_t slots, size_t stream_count)
{
  const std::vector<c10::cuda::CUDAStream> &streams = streams_of(stream_count);
  std::vector<void *> blocks(slots, nullptr);
  Times times;
  times.mallocs.reserve(operations.size());
  times.frees.reserve(operations.size());
  for (const Operation &one : operations) {
    if (one.code == DONE)
      continue;
    void *&block = blocks.at(one.slot);
    if (one.code == ALLOC) {
      const cudaStream_t stream = streams.at(one.stream).stream();
      const auto begin = Clock::now();
      block = allocator::raw_alloc_with_stream(one.size, stream);
      times.mallocs.push_back(ns_since(begin));
    } else {
      const auto begin = Clock::now();
      allocator::raw_delete(block);
      times.frees.push_back(ns_since(begin));
      block = nullptr;
    }
  }
  for (void *block : blocks)
    if (block)
      allocator::raw_delete(block);
  return times;
}

PyObject *bytes_of(const std::vector<uint32_t> &times)
{
  return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(times.data()),
                                   Py_ssize_t(times.size() * sizeof(uint32_t)));
}

PyObject *py_times_ns(PyObject *, PyObject *args)
{
  Py_buffer packed;
  Py_ssize_t slots, streams;
  if (!PyArg_ParseTuple(args, "y*nn", &packed, &slots, &streams))
    return nullptr;
  std::vector<Operation> operations(size_t(packed.len) / sizeof(Operation));
  std::memcpy(operations.data(), packed.buf, operations.size() * sizeof(Operation));
  PyBuffer_Release(&packed);
  Times times;
  if (!without_gil([&] { times = measure(operations, size_t(slots), size_t(streams)); }))
    return nullptr;
  return Py_BuildValue("NN", bytes_of(times.mallocs), bytes_of(times.frees));
}

PyMethodDef methods[] = {
    {"times_ns", py_times_ns, METH_VARARGS,
     "times_ns(packed operations, slots, streams) -> (bytes, bytes): ns of each malloc and of "
     "each free, uint32"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "malloc_times_loops",
                      nullptr,
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

} // namespace

PyMODINIT_FUNC PyInit_malloc_times_loops()
{
  return PyModule_Create(&module);
}
