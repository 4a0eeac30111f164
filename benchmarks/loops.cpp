// The measuring loops: they call torch's current allocator the way C++ code does, so that no
// Python is in the numbers. loops.py compiles them, and calls them without Python's lock. They need
// c10's headers only, and compile in seconds.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../csrc/python/capi.h"

namespace allocator = c10::cuda::CUDACachingAllocator;
using Clock = std::chrono::steady_clock;

namespace
{

std::string error; // of the last loop that threw

double nanoseconds_since(Clock::time_point begin)
{
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

// What `measure` returns; nan where it threw, and loops_error() says what.
template <typename Measure>
double measured(Measure measure)
{
  try {
    error.clear();
    return measure();
  } catch (const std::exception &e) {
    error = e.what();
    return std::numeric_limits<double>::quiet_NaN();
  }
}

// ns a call of `body`, over `count` calls.
template <typename Body>
double timed(long count, Body body)
{
  const auto begin = Clock::now();
  for (long i = 0; i < count; i++)
    body();
  return nanoseconds_since(begin) / double(count);
}

// --- marks -----------------------------------------------------------------

void must(const esper_capi *esper, esper_status status)
{
  if (status != ESPER_OK)
    throw std::runtime_error(esper->last_error());
}

const esper_capi *checked(const void *address)
{
  const auto *esper = static_cast<const esper_capi *>(address);
  if (esper->version != ESPER_CAPI_VERSION || esper->size != sizeof(esper_capi))
    throw std::runtime_error("esper_alloc._core has another C interface: rebuild esper_alloc");
  return esper;
}

enum { BARE, PUBLIC, IMMORTAL, COSTS };

// A mark in C beside the driver's record, by turns in one process, each round's ns:
// BARE a bare cuEventRecord; PUBLIC esper_alloc_record_use, which knows nothing of
// the stream; IMMORTAL esper_record_use on a stream that lives for ever, as the
// PyTorch part calls it.
void mark_costs(const esper_capi *esper, long rounds, long count, double *found)
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
  const void *block = allocator::raw_alloc(4096);
  auto timed_from_idle = [&](long calls, auto body) {
    C10_CUDA_CHECK(cudaStreamSynchronize(side.stream()));
    return timed(calls, body);
  };
  auto round = [&](long calls, double *costs) {
    costs[BARE] = timed_from_idle(calls, [&] {
      if (record(event, side.stream()))
        throw std::runtime_error("cuEventRecord failed");
    });
    costs[PUBLIC] =
        timed_from_idle(calls, [&] { must(esper, esper->alloc_record_use(block, side.stream())); });
    costs[IMMORTAL] = timed_from_idle(calls, [&] {
      must(esper, esper->record_use(core, &block, 1, stream, 0, nullptr));
    });
  };
  round(count / 10 + 1, found);
  for (long i = 0; i < rounds; i++)
    round(count, found + i * COSTS);
  C10_CUDA_CHECK(cudaStreamSynchronize(side));
  allocator::raw_delete(const_cast<void *>(block));
  C10_CUDA_CHECK(cudaEventDestroy(event));
}

// --- many threads, each on a stream of its own -----------------------------

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
  bool handing; // the next thread frees what a thread allocated
  std::atomic<int> phase{WARMING};
  std::atomic<int> ready{0};
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
  std::vector<std::future<uint64_t>> threads;
  for (size_t i = 0; i < streams.size(); i++)
    threads.push_back(std::async(std::launch::async, [&, i] {
      run.ready++;
      c10::cuda::CUDAStreamGuard guard(streams[i]);
      cudaFree(nullptr); // the thread has a context, as one that launches work has
      return work(run, i);
    }));
  while (run.ready < thread_count)
    std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds / 4 + 1));
  run.phase = COUNTING;
  const auto begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  run.phase = OVER;
  const double took = nanoseconds_since(begin);
  uint64_t pairs = 0;
  for (auto &thread : threads)
    pairs += thread.get(); // throws what the thread threw
  for (auto &ring : run.rings)
    while (void *block = ring->take())
      allocator::raw_delete(block);
  return double(pairs) / took * 1e3;
}

// --- among many live blocks ------------------------------------------------

// Sizes are 2^(least + (most - least) u^power), u from 0 to 1. The sequence is fixed, so every
// allocator gets the same one.
class Sizes
{
public:
  Sizes(double least, double most, double power)
  {
    std::mt19937_64 random(2024);
    for (auto &size : sizes_) {
      const double u = double(random() >> 11) * 0x1p-53;
      size = size_t(std::exp2(least + (most - least) * std::pow(u, power)));
    }
  }
  size_t next()
  {
    return sizes_[at_++ % sizes_.size()];
  }

private:
  std::vector<size_t> sizes_ = std::vector<size_t>(65521);
  size_t at_ = 0;
};

// Replaces the victims, for no more than `longest` seconds: ns of one replacement.
double replace(std::vector<void *> &blocks, const std::vector<uint32_t> &victims, Sizes &sizes,
               double longest)
{
  constexpr size_t LOOK = 1024; // at the clock, every so often
  size_t made = 0;
  const auto begin = Clock::now();
  for (const uint32_t victim : victims) {
    allocator::raw_delete(blocks[victim]);
    blocks[victim] = allocator::raw_alloc(sizes.next());
    if (++made % LOOK == 0 && nanoseconds_since(begin) > longest * 1e9)
      break;
  }
  return nanoseconds_since(begin) / double(made);
}

// A block drawn at random is freed and another size asked for in its place, `count` times in each
// of the rounds, whose ns go to `ns`. Where memory runs out, blocks stay: the process is to end.
void churn(size_t live, Sizes sizes, long count, int rounds, double longest, double *ns)
{
  std::mt19937_64 random(7);
  std::vector<uint32_t> victims(static_cast<size_t>(count));
  std::vector<void *> blocks(live);
  for (void *&block : blocks)
    block = allocator::raw_alloc(sizes.next());
  for (int round = 0; round <= rounds; round++) {
    for (auto &victim : victims)
      victim = uint32_t(random() % live);
    const double took = replace(blocks, victims, sizes, longest);
    if (round) // in the first one memory comes from the device
      ns[round - 1] = took;
  }
  // The highest address first: a sorted list of what is free is searched from the front.
  std::sort(blocks.begin(), blocks.end(), std::greater<>());
  for (void *block : blocks)
    allocator::raw_delete(block);
}

// --- a recorded job --------------------------------------------------------

// As esper_alloc/replay/operations.py packs them.
struct Operation {
  uint32_t code, slot, stream, pool;
  uint64_t size;
};
static_assert(sizeof(Operation) == 24);
enum : uint32_t { ALLOC, FREE, FREE_PENDING, DONE };

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

// The ns of each malloc and free. What a stream of the job still used when it was freed is freed
// like the rest: the streams are idle here. What is left live at the end is freed, untimed.
void times_ns(const std::vector<Operation> &operations, size_t slots, size_t stream_count,
              uint32_t *times)
{
  const std::vector<c10::cuda::CUDAStream> &streams = streams_of(stream_count);
  std::vector<void *> blocks(slots, nullptr);
  for (const Operation &one : operations) {
    uint32_t &took = *times++;
    if (one.code == DONE)
      continue;
    void *&block = blocks.at(one.slot);
    if (one.code == ALLOC) {
      const cudaStream_t stream = streams.at(one.stream).stream();
      const auto begin = Clock::now();
      block = allocator::raw_alloc_with_stream(one.size, stream);
      took = ns_since(begin);
    } else {
      const auto begin = Clock::now();
      allocator::raw_delete(block);
      took = ns_since(begin);
      block = nullptr;
    }
  }
  for (void *block : blocks)
    if (block)
      allocator::raw_delete(block);
}

} // namespace

// --- what loops.py calls ---------------------------------------------------

extern "C" {

const char *loops_error()
{
  return error.c_str();
}

const char *loops_capi_name()
{
  return ESPER_CAPI_NAME;
}

// One allocation and its free, nothing between: ns for a pair.
double loops_pair_ns(size_t size, long count)
{
  return measured(
      [&] { return timed(count, [&] { allocator::raw_delete(allocator::raw_alloc(size)); }); });
}

double loops_mark_costs(const void *esper, long rounds, long count, double *found)
{
  return measured([&] {
    mark_costs(checked(esper), rounds, count, found);
    return 0.0;
  });
}

double loops_pairs_rate(int threads, size_t size, int handing, long milliseconds)
{
  return measured([&] { return pairs_rate(threads, size, handing != 0, milliseconds); });
}

double loops_churn(size_t live, double least, double most, double power, long count, int rounds,
                   double longest, double *ns)
{
  return measured([&] {
    churn(live, Sizes(least, most, power), count, rounds, longest, ns);
    return 0.0;
  });
}

double loops_times_ns(const Operation *operations, size_t count, size_t slots, size_t streams,
                      uint32_t *times)
{
  return measured([&] {
    times_ns({operations, operations + count}, slots, streams, times);
    return 0.0;
  });
}
}
