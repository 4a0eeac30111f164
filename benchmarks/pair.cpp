// The measuring loops of pair.py: they call torch's current allocator the way
// C++ code does, so that no Python is in the numbers. A plain CPython module:
// it needs c10's headers only, and compiles in seconds.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Clock = std::chrono::steady_clock;

double nanoseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

// One allocation and its free, nothing between: ns for a pair.
double pair_ns(size_t size, long count) {
  const auto begin = Clock::now();
  for (long i = 0; i < count; i++)
    allocator::raw_delete(allocator::raw_alloc(size));
  return nanoseconds_since(begin) / double(count);
}

// `live` blocks of 512 B to 8 MiB, log-uniform; each step replaces a random
// one. The sequence is fixed, so every allocator gets the same one.
double churn_ns(size_t live, long count) {
  std::mt19937_64 random(2024);
  std::uniform_real_distribution<double> exponent(9.0, 23.0);
  std::vector<size_t> sizes(4096);
  for (auto &size : sizes)
    size = size_t(std::exp2(exponent(random)));
  std::vector<void *> blocks(live);
  size_t next = 0;
  for (auto &block : blocks)
    block = allocator::raw_alloc(sizes[next++ % sizes.size()]);
  std::vector<uint32_t> victims(count);
  for (auto &victim : victims)
    victim = uint32_t(random() % live);
  auto replace = [&](long i) {
    void *&block = blocks[victims[size_t(i)]];
    allocator::raw_delete(block);
    block = allocator::raw_alloc(sizes[next++ % sizes.size()]);
  };
  for (long i = 0; i < count; i++) // warm: memory comes from the device here
    replace(i);
  const auto begin = Clock::now();
  for (long i = 0; i < count; i++)
    replace(i);
  const double result = nanoseconds_since(begin) / double(count);
  for (auto block : blocks)
    allocator::raw_delete(block);
  return result;
}

// `count` pairs in each of several threads, a stream each: million pairs a second.
double threads_rate(int thread_count, size_t size, long count) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  std::vector<c10::cuda::CUDAStream> streams;
  for (int i = 0; i < thread_count; i++)
    streams.push_back(c10::cuda::getStreamFromPool(false, 0));
  for (int i = 0; i < thread_count; i++)
    threads.emplace_back([&, i] {
      try {
        c10::cuda::CUDAStreamGuard guard(streams[size_t(i)]);
        cudaFree(nullptr); // the thread has a context, as one that launches work has
        pair_ns(size, 100);
        ready++;
        while (!go)
          std::this_thread::yield();
        pair_ns(size, count);
      } catch (...) {
        failed = true;
        ready++;
      }
    });
  while (ready < thread_count)
    std::this_thread::yield();
  const auto begin = Clock::now();
  go = true;
  for (auto &thread : threads)
    thread.join();
  if (failed)
    throw std::runtime_error("a thread failed to allocate");
  return double(count) * thread_count / nanoseconds_since(begin) * 1e3;
}

// Re-recording one event on an idle stream: the driver's price of a mark.
double event_record_ns(long count) {
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

// Runs `measure` without the GIL and turns a C++ exception into Python's.
template <typename Measure> PyObject *measured(Measure measure) {
  double result = 0;
  std::string error;
  Py_BEGIN_ALLOW_THREADS
  try {
    result = measure();
  } catch (const std::exception &e) {
    error = e.what();
  }
  Py_END_ALLOW_THREADS
  if (!error.empty()) {
    PyErr_SetString(PyExc_RuntimeError, error.c_str());
    return nullptr;
  }
  return PyFloat_FromDouble(result);
}

PyObject *py_pair_ns(PyObject *, PyObject *args) {
  Py_ssize_t size;
  long count;
  if (!PyArg_ParseTuple(args, "nl", &size, &count))
    return nullptr;
  return measured([=] { return pair_ns(size_t(size), count); });
}

PyObject *py_churn_ns(PyObject *, PyObject *args) {
  Py_ssize_t live;
  long count;
  if (!PyArg_ParseTuple(args, "nl", &live, &count))
    return nullptr;
  return measured([=] { return churn_ns(size_t(live), count); });
}

PyObject *py_threads_rate(PyObject *, PyObject *args) {
  int threads;
  Py_ssize_t size;
  long count;
  if (!PyArg_ParseTuple(args, "inl", &threads, &size, &count))
    return nullptr;
  return measured([=] { return threads_rate(threads, size_t(size), count); });
}

PyObject *py_event_record_ns(PyObject *, PyObject *args) {
  long count;
  if (!PyArg_ParseTuple(args, "l", &count))
    return nullptr;
  return measured([=] { return event_record_ns(count); });
}

PyMethodDef methods[] = {
    {"pair_ns", py_pair_ns, METH_VARARGS, "pair_ns(size, count) -> ns a pair"},
    {"churn_ns", py_churn_ns, METH_VARARGS, "churn_ns(live, count) -> ns a replacement"},
    {"threads_rate", py_threads_rate, METH_VARARGS,
     "threads_rate(threads, size, count) -> million pairs a second"},
    {"event_record_ns", py_event_record_ns, METH_VARARGS,
     "event_record_ns(count) -> ns a record"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "pair_loops", nullptr, -1, methods,
                      nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_pair_loops() { return PyModule_Create(&module); }
