// machine_cuda.cu: a GPU as the machine for episodes and random programs.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "machine.h"

#define MUST(call)                                                         \
  do {                                                                     \
    cudaError_t must_status = (call);                                      \
    if (must_status == cudaErrorIllegalAddress)                            \
      machine_noticed("a kernel touched memory that is not there");        \
    if (must_status != cudaSuccess) {                                      \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(must_status)); \
      _exit(2);                                                            \
    }                                                                      \
  } while (0)

namespace
{

constexpr int EVENTS = 4096;
constexpr double HANG_SECONDS = 2;

cudaStream_t streams[MACHINE_STREAMS];
cudaStream_t rescuer;
cudaEvent_t events[EVENTS]; // used in turn
std::atomic<unsigned> next_event;
machine_error *errors; // in device memory
uint32_t *flag;        // in device memory: what stalled streams wait for
std::atomic<uint32_t> flag_value;
double cycles_per_us;

std::mutex mutex;                 // guards what follows
std::vector<cudaEvent_t> leaving; // the ends of destroyed streams
std::vector<std::pair<cudaGraph_t, cudaGraphExec_t>> graphs;
std::vector<cudaStream_t> mortal;

using value_function = int (*)(void *stream, unsigned long long address, uint32_t value,
                               unsigned flags);
value_function wait_value, write_value;

__device__ uint32_t pattern(uint32_t tag, uint32_t word)
{
  return tag * 0x9e3779b1u ^ word * 0x85ebca77u;
}

__global__ void write_words(uint32_t *at, size_t words, uint32_t tag)
{
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words;
       i += size_t{gridDim.x} * blockDim.x)
    at[i] = pattern(tag, static_cast<uint32_t>(i));
}

__global__ void check_words(const uint32_t *at, size_t begin, size_t words, uint32_t tag,
                            uint32_t step, machine_error *error)
{
  for (size_t i = begin + blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words;
       i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t seen = __ldcg(at + i), wanted = pattern(tag, static_cast<uint32_t>(i));
    if (seen != wanted && atomicAdd(&error->count, 1u) == 0) {
      error->step = step;
      error->word = static_cast<uint32_t>(i);
      error->wanted = wanted;
      error->seen = seen;
    }
  }
}

__global__ void spin(long long cycles)
{
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

int grid_of(size_t words)
{
  const size_t blocks = (words + 1023) / 1024;
  return static_cast<int>(blocks < 1 ? 1 : blocks > 128 ? 128 : blocks);
}

cudaStream_t stream_of(void *stream)
{
  return static_cast<cudaStream_t>(stream);
}

cudaEvent_t take_event()
{
  return events[next_event++ % EVENTS];
}

double seconds_now()
{
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

bool all_done(const std::vector<cudaEvent_t> &ends)
{
  for (cudaEvent_t end : ends) {
    const cudaError_t status = cudaEventQuery(end);
    if (status == cudaErrorNotReady)
      return false;
    MUST(status);
  }
  return true;
}

void *driver_function(void *library, const char *name)
{
  void *found = library ? dlsym(library, name) : nullptr;
  if (!found) {
    fprintf(stderr, "libcuda.so.1 has no %s\n", name);
    _exit(2);
  }
  return found;
}

} // namespace

void machine_open(void)
{
  MUST(cudaSetDevice(0));
  MUST(cudaFree(nullptr));
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  wait_value = reinterpret_cast<value_function>(driver_function(library, "cuStreamWaitValue32_v2"));
  write_value =
      reinterpret_cast<value_function>(driver_function(library, "cuStreamWriteValue32_v2"));
  int kilohertz = 0;
  MUST(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, 0));
  cycles_per_us = kilohertz / 1e3;
  MUST(cudaStreamCreateWithFlags(&rescuer, cudaStreamNonBlocking));
  for (cudaEvent_t &event : events)
    MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  MUST(cudaMalloc(&errors, sizeof *errors));
  MUST(cudaMemset(errors, 0, sizeof *errors));
  MUST(cudaMalloc(&flag, sizeof *flag));
  MUST(cudaMemset(flag, 0, sizeof *flag));
  MUST(cudaDeviceSynchronize()); // the streams do not wait for the memsets
  uint32_t *words = nullptr;
  MUST(cudaMalloc(&words, 4096));
  for (cudaStream_t &stream : streams) {
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    // Loading a kernel may wait for those that run: load them all now.
    write_words<<<1, 256, 0, stream>>>(words, 1024, 1);
    check_words<<<1, 256, 0, stream>>>(words, 0, 1024, 1, 0, errors);
    spin<<<1, 1, 0, stream>>>(1000);
    MUST(cudaGetLastError());
    MUST(cudaStreamSynchronize(stream));
  }
  const machine_error found = machine_errors();
  if (found.count) {
    fputs("a pattern is not read back even with nothing else going on\n", stderr);
    _exit(2);
  }
  MUST(cudaFree(words));
}

const esper_driver *machine_begin(uint64_t)
{
  const esper_driver *driver = nullptr;
  if (esper_cuda_driver(&driver) != ESPER_OK) {
    fprintf(stderr, "no CUDA driver: %s\n", esper_last_error());
    _exit(2);
  }
  return driver;
}

void machine_end(void)
{
  for (const auto &graph : graphs) {
    if (graph.second)
      MUST(cudaGraphExecDestroy(graph.second));
    MUST(cudaGraphDestroy(graph.first));
  }
  graphs.clear();
}

void *machine_stream(int index)
{
  return streams[index];
}

void *machine_stream_create(void)
{
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::lock_guard<std::mutex> lock(mutex);
  mortal.push_back(stream);
  return stream;
}

void machine_stream_destroy(void *stream)
{
  cudaEvent_t end = take_event();
  MUST(cudaEventRecord(end, stream_of(stream)));
  MUST(cudaStreamDestroy(stream_of(stream)));
  std::lock_guard<std::mutex> lock(mutex);
  leaving.push_back(end);
  for (size_t i = 0; i < mortal.size(); i++)
    if (mortal[i] == stream_of(stream)) {
      mortal.erase(mortal.begin() + static_cast<long>(i));
      break;
    }
}

void machine_wait(void *reader, void *owner)
{
  if (reader == owner)
    return;
  cudaEvent_t event = take_event();
  MUST(cudaEventRecord(event, stream_of(owner)));
  MUST(cudaStreamWaitEvent(stream_of(reader), event, 0));
}

void machine_delay(void *stream, unsigned microseconds)
{
  spin<<<1, 1, 0, stream_of(stream)>>>(static_cast<long long>(microseconds * cycles_per_us));
  MUST(cudaGetLastError());
}

void machine_write(void *stream, void *at, size_t size, uint32_t tag)
{
  const size_t words = size / 4;
  write_words<<<grid_of(words), 256, 0, stream_of(stream)>>>(static_cast<uint32_t *>(at), words,
                                                             tag);
  MUST(cudaGetLastError());
}

void machine_check(void *stream, const void *at, size_t begin, size_t size, uint32_t tag,
                   uint32_t step)
{
  const size_t words = size / 4;
  check_words<<<grid_of(words), 256, 0, stream_of(stream)>>>(static_cast<const uint32_t *>(at),
                                                             begin / 4, words, tag, step, errors);
  MUST(cudaGetLastError());
}

void *machine_event(void *stream)
{
  cudaEvent_t event = take_event();
  MUST(cudaEventRecord(event, stream_of(stream)));
  return event;
}

void machine_event_again(void *event, void *stream)
{
  MUST(cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(stream)));
}

void machine_event_done(void *)
{
}

void machine_stall(void *stream)
{
  const auto address = reinterpret_cast<unsigned long long>(flag);
  if (wait_value(stream, address, ++flag_value, 0)) { // 0: until it is at least that
    fputs("cuStreamWaitValue32 failed\n", stderr);
    _exit(2);
  }
}

void machine_let_go(void *stream)
{
  const auto address = reinterpret_cast<unsigned long long>(flag);
  if (write_value(stream, address, flag_value, 0)) {
    fputs("cuStreamWriteValue32 failed\n", stderr);
    _exit(2);
  }
}

void machine_capture_begin(void *stream)
{
  MUST(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeRelaxed));
}

void *machine_capture_end(void *stream)
{
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(stream_of(stream), &graph) != cudaSuccess || !graph) {
    cudaGetLastError();
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex);
  graphs.emplace_back(graph, nullptr);
  return graph;
}

size_t machine_nodes(void *graph)
{
  size_t count = 0;
  MUST(cudaGraphGetNodes(static_cast<cudaGraph_t>(graph), nullptr, &count));
  return count;
}

void machine_launch(void *graph, void *stream)
{
  std::lock_guard<std::mutex> lock(mutex);
  for (auto &known : graphs)
    if (known.first == graph) {
      if (!known.second)
        MUST(cudaGraphInstantiate(&known.second, known.first, 0));
      MUST(cudaGraphLaunch(known.second, stream_of(stream)));
    }
}

void machine_want_contents(void)
{
}

void machine_write_now(void *at, size_t size, uint32_t tag)
{
  machine_write(streams[0], at, size, tag);
  MUST(cudaDeviceSynchronize());
}

int machine_reads_now(const void *at, size_t size, uint32_t tag)
{
  machine_check(streams[0], at, 0, size, tag, 0);
  MUST(cudaDeviceSynchronize());
  return machine_errors().count == 0;
}

void machine_sync(void *stream)
{
  MUST(cudaStreamSynchronize(stream_of(stream)));
}

int machine_is_busy(void *stream)
{
  const cudaError_t status = cudaStreamQuery(stream_of(stream));
  if (status == cudaErrorNotReady)
    return 1;
  MUST(status);
  return 0;
}

void machine_pause(uint64_t random)
{
  const double until = seconds_now() + 1e-6 * static_cast<double>(random % 100);
  while (seconds_now() < until) {
  }
}

int machine_finish(void)
{
  std::vector<cudaEvent_t> ends;
  {
    std::lock_guard<std::mutex> lock(mutex);
    ends.swap(leaving);
    for (cudaStream_t stream : mortal) {
      ends.push_back(take_event());
      MUST(cudaEventRecord(ends.back(), stream));
    }
  }
  for (cudaStream_t stream : streams) {
    ends.push_back(take_event());
    MUST(cudaEventRecord(ends.back(), stream));
  }
  const double limit = seconds_now() + HANG_SECONDS;
  while (!all_done(ends))
    if (seconds_now() > limit) {
      machine_let_go(rescuer);
      MUST(cudaDeviceSynchronize());
      return 0;
    }
  return 1;
}

machine_error machine_errors(void)
{
  machine_error found;
  MUST(cudaMemcpy(&found, errors, sizeof found, cudaMemcpyDeviceToHost));
  return found;
}

void machine_owner_begin(void *, size_t, void *)
{
}

void machine_owner_end(void *)
{
}
