// What normalize.cu needs of CUDA, for a C++ compiler: each thread of a kernel is a
// fiber that runs until it meets a barrier (of its warp, its block or the grid), where
// it waits for those it shares the barrier with.
//
// Blocks of a cooperative launch are alive together, those of another one after the
// other, in reverse order, so that none may count on an earlier one. Shared memory
// begins with rubbish.
#pragma once

#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)

using std::isfinite;

namespace fibers
{

struct Barrier {
  int members = 0, arrived = 0;
  long turn = 0;
};

struct Block {
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<double> lanes; // what shuffles exchange
  std::vector<char> shared;
  uint3 index;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block *block = nullptr;
  unsigned thread = 0;
  Barrier *waits_for = nullptr;
  long turn = 0;
  bool done = false;
};

constexpr size_t kStack = 64 * 1024, kShared = 64 * 1024;

inline ucontext_t scheduler;
inline Fiber *running = nullptr;
inline Barrier grid;
inline uint3 grid_size;
inline std::function<void()> body;
inline int launches = 0, cooperative_launches = 0;

inline void wait_at(Barrier &barrier)
{
  running->waits_for = &barrier;
  running->turn = barrier.turn;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    barrier.turn++;
  }
  swapcontext(&running->context, &scheduler);
}

inline void enter()
{
  body();
  running->done = true;
  swapcontext(&running->context, &scheduler);
}

// Runs these blocks together. A barrier that not all of its threads reach ends the process.
inline void run_blocks(const std::vector<uint3> &indices, unsigned threads)
{
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> all;
  grid = Barrier{static_cast<int>(indices.size() * threads), 0, 0};
  for (const uint3 &index : indices) {
    blocks.push_back(std::make_unique<Block>());
    Block &block = *blocks.back();
    block.all.members = static_cast<int>(threads);
    block.warps.assign(threads / 32, Barrier{32, 0, 0});
    block.lanes.resize(threads);
    block.shared.assign(kShared, '\xff');
    block.index = index;
    for (unsigned thread = 0; thread < threads; thread++) {
      all.push_back(std::make_unique<Fiber>());
      Fiber &fiber = *all.back();
      fiber.block = &block;
      fiber.thread = thread;
      fiber.stack.reset(new char[kStack]);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      makecontext(&fiber.context, enter, 0);
    }
  }
  for (size_t left = all.size(); left > 0;) {
    bool moved = false;
    for (auto &fiber : all) {
      const bool waits = fiber->waits_for != nullptr && fiber->waits_for->turn == fiber->turn;
      if (fiber->done || waits) {
        continue;
      }
      moved = true;
      running = fiber.get();
      swapcontext(&scheduler, &fiber->context);
      left -= fiber->done;
    }
    if (!moved) {
      abort();
    }
  }
}

template <typename Kernel, typename Job>
cudaError_t launch(Kernel kernel, dim3 blocks, unsigned threads, const Job &job, bool together)
{
  launches++;
  cooperative_launches += together;
  grid_size = uint3{blocks.x, blocks.y, blocks.z};
  body = [&] { kernel(job); };
  std::vector<uint3> indices;
  for (unsigned y = blocks.y; y-- > 0;) {
    for (unsigned x = blocks.x; x-- > 0;) {
      indices.push_back(uint3{x, y, 0});
    }
  }
  if (together) {
    run_blocks(indices, threads);
  } else {
    for (const uint3 &index : indices) {
      run_blocks({index}, threads);
    }
  }
  return cudaSuccess;
}

template <typename T>
T &shared_at(size_t offset)
{
  return *reinterpret_cast<T *>(running->block->shared.data() + offset);
}

} // namespace fibers

#define blockIdx (fibers::running->block->index)
#define threadIdx (uint3{fibers::running->thread, 0, 0})
#define gridDim (fibers::grid_size)

inline void __syncthreads()
{
  fibers::wait_at(fibers::running->block->all);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int offset)
{
  fibers::Block &block = *fibers::running->block;
  const unsigned mine = fibers::running->thread;
  block.lanes[mine] = static_cast<double>(value);
  fibers::wait_at(block.warps[mine / 32]);
  const T theirs = static_cast<T>(block.lanes[mine ^ static_cast<unsigned>(offset)]);
  fibers::wait_at(block.warps[mine / 32]);
  return theirs;
}

inline void __stwb(int4 *to, int4 word)
{
  *to = word;
}

inline void atomicAdd(unsigned long long *sum, unsigned long long value)
{
  *sum += value;
}

namespace cooperative_groups
{
struct Grid {
  void sync()
  {
    fibers::wait_at(fibers::grid);
  }
};
inline Grid this_grid()
{
  return {};
}
} // namespace cooperative_groups

// A device of six processors, each with room for one block.
extern "C" {
cudaError_t cudaGetDevice(int *device)
{
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int)
{
  *value = which == cudaDevAttrCooperativeLaunch ? 1 : 6;
  return cudaSuccess;
}
cudaError_t cudaGetLastError()
{
  return cudaSuccess;
}
__attribute__((visibility("default"))) int launches_so_far()
{
  return fibers::launches;
}
__attribute__((visibility("default"))) int cooperative_launches_so_far()
{
  return fibers::cooperative_launches;
}
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel, int, size_t)
{
  *blocks = 1;
  return cudaSuccess;
}
