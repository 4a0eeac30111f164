// The measuring loops of threads.py: many threads allocate and free, each on a stream of
// its own.
#include "loops.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>

namespace
{

constexpr size_t LINE = 64;

// What one thread hands to another, in order. One puts, one takes.
struct Ring {
  static constexpr size_t SIZE = 16;
  alignas(LINE) std::atomic<size_t> put_count{0};
  alignas(LINE) std::atomic<size_t> taken_count{0};
  alignas(LINE) void *blocks[SIZE];

  bool put(void *block)
  {
    const size_t count = put_count.load(std::memory_order_relaxed);
    if (count - taken_count.load(std::memory_order_acquire) == SIZE)
      return false;
    blocks[count % SIZE] = block;
    put_count.store(count + 1, std::memory_order_release);
    return true;
  }

  void *take()
  {
    const size_t count = taken_count.load(std::memory_order_relaxed);
    if (count == put_count.load(std::memory_order_acquire))
      return nullptr;
    void *block = blocks[count % SIZE];
    taken_count.store(count + 1, std::memory_order_release);
    return block;
  }
};

enum Phase : int { WARMING, COUNTING, OVER };

struct Run {
  size_t size;
  bool handing;
  std::atomic<int> phase{WARMING};
  std::atomic<int> ready{0};
  std::atomic<bool> failed{false};
  std::vector<std::unique_ptr<Ring>> rings; // one from each thread to the next
};

// To the next thread; if the ring is full, what came from the one before is freed first.
bool hand_on(Run &run, Ring &out, Ring &in, void *block)
{
  while (!out.put(block)) {
    if (void *other = in.take())
      allocator::raw_delete(other);
    else
      std::this_thread::yield();
    if (run.phase.load(std::memory_order_relaxed) == OVER) {
      allocator::raw_delete(block);
      return false;
    }
  }
  return true;
}

// Allocations and frees until it is over: how many of each while they were counted.
uint64_t work(Run &run, size_t self)
{
  Ring &out = *run.rings[self];
  Ring &in = *run.rings[(self + run.rings.size() - 1) % run.rings.size()];
  uint64_t pairs = 0;
  for (int phase; (phase = run.phase.load(std::memory_order_relaxed)) != OVER;) {
    void *block = allocator::raw_alloc(run.size);
    if (!run.handing) {
      allocator::raw_delete(block);
    } else {
      if (!hand_on(run, out, in, block))
        break;
      if (void *other = in.take())
        allocator::raw_delete(other);
    }
    pairs += phase == COUNTING;
  }
  return pairs;
}

// Million pairs a second of all threads together.
double pairs_rate(int thread_count, size_t size, bool handing, long milliseconds)
{
  Run run;
  run.size = size;
  run.handing = handing;
  std::vector<c10::cuda::CUDAStream> streams;
  for (int i = 0; i < thread_count; i++) {
    streams.push_back(c10::cuda::getStreamFromPool(false, 0));
    run.rings.push_back(std::make_unique<Ring>());
  }
  std::vector<uint64_t> pairs(size_t(thread_count) * LINE, 0); // each on a line of its own
  std::vector<std::thread> threads;
  for (int i = 0; i < thread_count; i++)
    threads.emplace_back([&, i] {
      try {
        c10::cuda::CUDAStreamGuard guard(streams[size_t(i)]);
        cudaFree(nullptr); // the thread has a context, as one that launches work has
        run.ready++;
        pairs[size_t(i) * LINE] = work(run, size_t(i));
      } catch (const std::exception &) {
        run.ready++;
        run.failed = true;
        run.phase = OVER;
      }
    });
  while (run.ready < thread_count)
    std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds / 4 + 1));
  int warming = WARMING;
  run.phase.compare_exchange_strong(warming, COUNTING);
  const auto begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  run.phase = OVER;
  const double took = nanoseconds_since(begin);
  for (auto &thread : threads)
    thread.join();
  for (auto &ring : run.rings)
    while (void *block = ring->take())
      allocator::raw_delete(block);
  if (run.failed)
    throw std::runtime_error("a thread failed to allocate");
  uint64_t sum = 0;
  for (uint64_t count : pairs)
    sum += count;
  return double(sum) / took * 1e3;
}

PyObject *py_pairs_rate(PyObject *, PyObject *args)
{
  int threads, handing;
  Py_ssize_t size;
  long milliseconds;
  if (!PyArg_ParseTuple(args, "inpl", &threads, &size, &handing, &milliseconds))
    return nullptr;
  double rate = 0;
  if (!without_gil([&] { rate = pairs_rate(threads, size_t(size), handing != 0, milliseconds); }))
    return nullptr;
  return PyFloat_FromDouble(rate);
}

PyMethodDef methods[] = {
    {"pairs_rate", py_pairs_rate, METH_VARARGS,
     "pairs_rate(threads, size, handing, milliseconds) -> million pairs a second; handing: "
     "the next thread frees what a thread allocated"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "threads_loops",
                      nullptr,
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

} // namespace

PyMODINIT_FUNC PyInit_threads_loops()
{
  return PyModule_Create(&module);
}
