// The normalisers' kernels: moments of a batch, their merge into the state, and the
// batch normalised by it, in one launch.
//
// A block looks after a group of neighbouring columns, each thread after `vector`
// columns of every height-th row. Batches of few rows have one block for each group of
// columns, narrow ones, so that there are many: no block waits for another. Batches of
// many rows are cut into row groups too; such a launch is cooperative, each block
// writes its part's moments, and after a barrier of the whole grid each merges all
// parts of its columns by itself, in the same order, so all come to the same result.
#include "normalize.h"

#include <atomic>
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "scaling.h"

namespace {

using esper::Line;
using esper::merge;
using esper::Moments;
using esper::Remembered;
using esper::Scaler;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxColumns = 64; // of a block
constexpr int kUnroll = 4; // rows that a thread loads at once
constexpr int64_t kFewRows = 4096; // up to here a column group is one block's
constexpr int kMaxDevices = 64;

// --- values ------------------------------------------------------------------

template <typename T>
struct Arithmetic {
  using type = float; // also of the results
};
template <>
struct Arithmetic<double> {
  using type = double;
};

__device__ float number(float x) { return x; }
__device__ double number(double x) { return x; }
__device__ float number(__half x) { return __half2float(x); }
__device__ float number(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, int N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Pack {
  T of[N];
};

// --- what a launch is given --------------------------------------------------

struct Job {
  esper_normalizer_state state;
  esper_normalizer_batch batch;
  esper_normalizer_rule rule;
  void *out;      // NULL: only the state is wanted
  double *parts;  // row groups x 3 x padded columns, and the rows that counted
  int log2_width; // threads beside each other in a row
};

// Where a thread stands.
template <int V>
struct Place {
  int width, lane, first_row, rows_apart, columns;
  int64_t group, column; // first column of the block, of the thread
  bool active;

  __device__ explicit Place(const Job &job)
  {
    width = 1 << job.log2_width;
    lane = threadIdx.x & (width - 1);
    columns = width * V;
    const int height = kThreads >> job.log2_width;
    first_row = blockIdx.y * height + (threadIdx.x >> job.log2_width);
    rows_apart = gridDim.y * height;
    group = (int64_t)blockIdx.x * columns;
    column = group + (int64_t)lane * V;
    active = column < job.state.features;
  }
};

template <typename T>
__device__ double weight_of(const Job &job, int64_t row, int64_t column, T x)
{
  const esper_normalizer_batch &batch = job.batch;
  const int64_t each = row * job.state.features + column;
  if (!isfinite(number(x)) || (batch.mask && !batch.mask[batch.mask_each ? each : row]))
    return 0.0;
  if (!batch.weights)
    return 1.0;
  const double weight = batch.weights[batch.weights_each ? each : row];
  return isfinite(weight) && weight > 0.0 ? weight : 0.0;
}

// Whether a row counts whose first value does not.
template <typename T>
__device__ bool another_contributes(const Job &job, int64_t row)
{
  const T *values = static_cast<const T *>(job.batch.values) + row * job.state.features;
  for (int64_t column = 1; column < job.state.features; column++)
    if (weight_of(job, row, column, values[column]) > 0.0)
      return true;
  return false;
}

// --- moments of a thread's values, of a block's, of the grid's ----------------

// `rows` grows by the rows that count, in the thread that has their first value.
template <typename T, int V, bool Weighted>
__device__ void add_up(const Job &job, const Place<V> &place, Moments (&moments)[V], int64_t &rows)
{
  const int64_t features = job.state.features, last = job.batch.rows;
  const T *values = static_cast<const T *>(job.batch.values) + place.column;
  esper::Sum sums[V];
  esper::WeightedSum weighted[V];
  int64_t row = place.active ? place.first_row : last;
  for (; row < last; row += (int64_t)place.rows_apart * kUnroll) {
    Pack<T, V> packs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; i++) {
      const int64_t here = row + (int64_t)i * place.rows_apart;
      if (here < last)
        packs[i] = *reinterpret_cast<const Pack<T, V> *>(values + here * features);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; i++) {
      const int64_t here = row + (int64_t)i * place.rows_apart;
      if (here >= last)
        break;
      bool first_counts = false;
#pragma unroll
      for (int v = 0; v < V; v++) {
        if (Weighted) {
          const double weight = weight_of(job, here, place.column + v, packs[i].of[v]);
          if (weight > 0.0)
            weighted[v].add(number(packs[i].of[v]), weight);
          first_counts = v == 0 ? weight > 0.0 : first_counts;
        } else {
          const bool counts = isfinite(number(packs[i].of[v]));
          if (counts)
            sums[v].add(number(packs[i].of[v]));
          first_counts = v == 0 ? counts : first_counts;
        }
      }
      if (place.column == 0)
        rows += first_counts || another_contributes<T>(job, here);
    }
  }
#pragma unroll
  for (int v = 0; v < V; v++)
    moments[v] = Weighted ? weighted[v].moments() : sums[v].moments();
}

__device__ Moments from_lane(const Moments &mine, int offset)
{
  return Moments{__shfl_xor_sync(~0u, mine.weight, offset),
                 __shfl_xor_sync(~0u, mine.mean, offset),
                 __shfl_xor_sync(~0u, mine.spread, offset)};
}

// Merges `count` times `columns` moments into the first `columns`. A power of two each.
__device__ void merge_shared(Moments *shared, int count, int columns)
{
  for (int half = count / 2; half > 0; half /= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < half * columns; i += kThreads)
      shared[i] = merge(shared[i], shared[i + half * columns]);
  }
  __syncthreads();
}

template <int V>
__device__ void merge_block(const Place<V> &place, Moments (&moments)[V], Moments *shared)
{
  for (int offset = 16; offset >= place.width; offset /= 2)
#pragma unroll
    for (int v = 0; v < V; v++)
      moments[v] = merge(moments[v], from_lane(moments[v], offset));
  if ((int)(threadIdx.x & 31) < place.width)
#pragma unroll
    for (int v = 0; v < V; v++)
      shared[(threadIdx.x >> 5) * place.columns + place.lane * V + v] = moments[v];
  merge_shared(shared, kWarps, place.columns);
}

__device__ double *part_of(const Job &job, int row_group, int columns)
{
  return job.parts + (int64_t)row_group * 3 * gridDim.x * columns;
}

__device__ double *rows_of(const Job &job, int columns)
{
  return job.parts + (int64_t)gridDim.y * 3 * gridDim.x * columns;
}

__device__ void write_part(const Job &job, int64_t group, int columns, const Moments *shared)
{
  double *part = part_of(job, blockIdx.y, columns);
  const int64_t padded = (int64_t)gridDim.x * columns;
  if ((int)threadIdx.x < columns) {
    const int64_t at = group + threadIdx.x;
    part[at] = shared[threadIdx.x].weight;
    part[padded + at] = shared[threadIdx.x].mean;
    part[2 * padded + at] = shared[threadIdx.x].spread;
  }
}

__device__ void merge_parts(const Job &job, int64_t group, int columns, Moments *shared)
{
  const int64_t padded = (int64_t)gridDim.x * columns;
  const int slots = kThreads / columns, slot = threadIdx.x / columns;
  const int64_t at = group + threadIdx.x % columns;
  Moments all = esper::no_moments();
#pragma unroll 4
  for (int part = slot; part < (int)gridDim.y; part += slots) {
    const double *from = part_of(job, part, columns);
    all = merge(all, Moments{from[at], from[padded + at], from[2 * padded + at]});
  }
  __syncthreads();
  shared[threadIdx.x] = all; // slot * columns + column
  merge_shared(shared, slots, columns);
}

// --- state -------------------------------------------------------------------

__device__ Remembered remembered(const esper_normalizer_state &state, int64_t column)
{
  const int64_t n = state.features;
  return Remembered{esper::believed(state.moments[column], state.mean[column]),
                    esper::believed(state.moments[n + column], state.variance[column]),
                    state.moments[2 * n + column]};
}

__device__ void remember(const esper_normalizer_state &state, int64_t column, const Remembered &now)
{
  const int64_t n = state.features;
  state.moments[column] = now.mean;
  state.moments[n + column] = now.variance;
  state.moments[2 * n + column] = now.weight;
  state.mean[column] = (float)now.mean;
  state.variance[column] = (float)now.variance;
}

// --- normalising -------------------------------------------------------------

template <typename T, int V>
__device__ void apply(const Job &job, const Place<V> &place, const Line *lines)
{
  using A = typename Arithmetic<T>::type;
  if (!place.active)
    return;
  Scaler<A> scalers[V];
#pragma unroll
  for (int v = 0; v < V; v++)
    scalers[v] = Scaler<A>(lines[place.lane * V + v], job.rule);
  const int64_t features = job.state.features, last = job.batch.rows;
  const T *values = static_cast<const T *>(job.batch.values) + place.column;
  A *out = static_cast<A *>(job.out) + place.column;
  for (int64_t row = place.first_row; row < last; row += (int64_t)place.rows_apart * kUnroll) {
    Pack<T, V> packs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; i++) {
      const int64_t here = row + (int64_t)i * place.rows_apart;
      if (here < last)
        packs[i] = *reinterpret_cast<const Pack<T, V> *>(values + here * features);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; i++) {
      const int64_t here = row + (int64_t)i * place.rows_apart;
      if (here >= last)
        break;
      Pack<A, V> result;
#pragma unroll
      for (int v = 0; v < V; v++)
        result.of[v] = scalers[v](number(packs[i].of[v]));
      *reinterpret_cast<Pack<A, V> *>(out + here * features) = result;
    }
  }
}

template <typename T, int V, bool Weighted>
__global__ void __launch_bounds__(kThreads) update_kernel(const Job job)
{
  __shared__ Moments shared[kWarps * kMaxColumns];
  __shared__ Line lines[kMaxColumns];
  __shared__ unsigned long long rows;
  const Place<V> place(job);
  const int64_t mine = place.group + threadIdx.x; // of the first `columns` threads
  const bool keeper = (int)threadIdx.x < place.columns && mine < job.state.features;
  // The state is read before the barrier, and written behind it.
  Remembered old = {0.0, 1.0, 0.0};
  if (keeper)
    old = remembered(job.state, mine);
  if (threadIdx.x == 0)
    rows = 0;
  __syncthreads();

  Moments moments[V];
  int64_t counted = 0;
  add_up<T, V, Weighted>(job, place, moments, counted);
  if (counted != 0)
    atomicAdd(&rows, (unsigned long long)counted);
  merge_block(place, moments, shared);

  if (gridDim.y > 1) {
    write_part(job, place.group, place.columns, shared);
    if (blockIdx.x == 0 && threadIdx.x == 0)
      rows_of(job, place.columns)[blockIdx.y] = (double)rows;
    cooperative_groups::this_grid().sync();
    merge_parts(job, place.group, place.columns, shared);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      double all = 0.0;
      for (int part = 0; part < (int)gridDim.y; part++)
        all += rows_of(job, place.columns)[part];
      rows = (unsigned long long)all;
    }
  }
  if (keeper) {
    const Remembered now =
        esper::take_in(old, shared[threadIdx.x], job.rule.momentum, job.rule.warm_up);
    if (blockIdx.y == 0)
      remember(job.state, mine, now);
    lines[threadIdx.x] = esper::line_of(now, job.rule);
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    *job.state.count += (int64_t)rows;
  if (job.out) {
    __syncthreads();
    apply<T, V>(job, place, lines);
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads) apply_kernel(const Job job)
{
  __shared__ Line lines[kMaxColumns];
  const Place<V> place(job);
  const int64_t mine = place.group + threadIdx.x;
  if ((int)threadIdx.x < place.columns && mine < job.state.features)
    lines[threadIdx.x] = esper::line_of(remembered(job.state, mine), job.rule);
  __syncthreads();
  apply<T, V>(job, place, lines);
}

// --- launching ---------------------------------------------------------------

using Kernel = void (*)(Job);

// How a batch is laid out over threads.
struct Layout {
  Kernel update, apply;
  int vector;
  std::atomic<int> *resident; // blocks of `update` that fit at once, by device; 0: not asked
};

template <typename T, int V, bool Weighted>
Layout layout()
{
  static std::atomic<int> resident[kMaxDevices];
  return Layout{update_kernel<T, V, Weighted>, apply_kernel<T, V>, V, resident};
}

bool aligned(const void *pointer, size_t bytes)
{
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <typename T>
Layout choose(const esper_normalizer_state &state, const esper_normalizer_batch &batch)
{
  if (batch.mask || batch.weights)
    return layout<T, 1, true>();
  if (state.features % 4 == 0 && aligned(batch.values, alignof(Pack<T, 4>)))
    return layout<T, 4, false>();
  return layout<T, 1, false>();
}

Layout choose_layout(const esper_normalizer_state &state, const esper_normalizer_batch &batch)
{
  switch (batch.type) {
  case ESPER_DOUBLE: return choose<double>(state, batch);
  case ESPER_HALF: return choose<__half>(state, batch);
  case ESPER_BFLOAT16: return choose<__nv_bfloat16>(state, batch);
  default: return choose<float>(state, batch);
  }
}

int64_t divide_up(int64_t a, int64_t b)
{
  return (a + b - 1) / b;
}

// Columns as narrow as a sector of memory allows, wider where a block would have more
// rows of threads than there are rows, or where several blocks share a column.
int choose_log2_width(const Layout &chosen, int64_t features, int64_t rows)
{
  const int64_t units = divide_up(features, chosen.vector);
  const int widest = chosen.vector == 1 ? 5 : 4;
  int log2 = chosen.vector == 1 ? 3 : 1;
  while (log2 < widest && (rows > kFewRows || (kThreads >> log2) > rows))
    log2++;
  while (log2 > 0 && ((int64_t)1 << (log2 - 1)) >= units)
    log2--;
  return log2;
}

// Blocks of the kernel that run at once on the current device; 1 if it has no barrier.
cudaError_t ask_resident(const Layout &chosen, int *blocks)
{
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess)
    return error;
  if (device < kMaxDevices && (*blocks = chosen.resident[device].load()) != 0)
    return cudaSuccess;
  int cooperative = 0, each = 0, processors = 0;
  if ((error = cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device)) ||
      (error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) ||
      (error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, chosen.update, kThreads, 0)))
    return error;
  *blocks = cooperative && each > 0 ? each * processors : 1;
  if (device < kMaxDevices)
    chosen.resident[device].store(*blocks);
  return cudaSuccess;
}

struct Grid {
  int log2_width;
  dim3 blocks;
};

cudaError_t plan_update(const Layout &chosen, int64_t features, int64_t rows, Grid *grid)
{
  const int log2 = choose_log2_width(chosen, features, rows);
  const int64_t groups = divide_up(features, (int64_t)chosen.vector << log2);
  int64_t parts = 1;
  if (rows > kFewRows) {
    int resident = 1;
    const cudaError_t error = ask_resident(chosen, &resident);
    if (error != cudaSuccess)
      return error;
    parts = divide_up(rows, (int64_t)(kThreads >> log2) * kUnroll);
    parts = parts < resident / groups ? parts : resident / groups;
    parts = parts > 1 ? parts : 1;
  }
  *grid = Grid{log2, dim3((unsigned)groups, (unsigned)parts)};
  return cudaSuccess;
}

} // namespace

extern "C" size_t esper_normalizer_scratch(const esper_normalizer_state *state,
                                           const esper_normalizer_batch *batch)
{
  const Layout chosen = choose_layout(*state, *batch);
  Grid grid;
  if (plan_update(chosen, state->features, batch->rows, &grid) != cudaSuccess || grid.blocks.y == 1)
    return 0; // the launch meets the same error, and returns it
  const size_t padded = (size_t)grid.blocks.x * ((size_t)chosen.vector << grid.log2_width);
  return grid.blocks.y * (3 * padded + 1);
}

extern "C" cudaError_t esper_normalizer_update(const esper_normalizer_state *state,
                                               const esper_normalizer_batch *batch,
                                               const esper_normalizer_rule *rule, void *out,
                                               double *scratch, cudaStream_t stream)
{
  if (batch->rows == 0 || state->features == 0)
    return cudaSuccess;
  const Layout chosen = choose_layout(*state, *batch);
  Grid grid;
  const cudaError_t error = plan_update(chosen, state->features, batch->rows, &grid);
  if (error != cudaSuccess)
    return error;
  if (scratch == NULL)
    grid.blocks.y = 1;
  Job job = {*state, *batch, *rule, out, scratch, grid.log2_width};
  if (grid.blocks.y > 1) {
    void *arguments[] = {&job};
    const cudaError_t failed = cudaLaunchCooperativeKernel((const void *)chosen.update, grid.blocks,
                                                           dim3(kThreads), arguments, 0, stream);
    if (failed != cudaErrorCooperativeLaunchTooLarge)
      return failed;
    cudaGetLastError(); // part of the device is not ours to use: one block a column group
    grid.blocks.y = 1;
  }
  chosen.update<<<grid.blocks, kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

extern "C" cudaError_t esper_normalizer_apply(const esper_normalizer_state *state,
                                              const esper_normalizer_batch *batch,
                                              const esper_normalizer_rule *rule, void *out,
                                              cudaStream_t stream)
{
  if (batch->rows == 0 || state->features == 0)
    return cudaSuccess;
  const Layout chosen = choose_layout(*state, *batch);
  const int log2 = choose_log2_width(chosen, state->features, kFewRows + 1);
  const int64_t groups = divide_up(state->features, (int64_t)chosen.vector << log2);
  const int64_t heights = divide_up(batch->rows, (int64_t)(kThreads >> log2) * kUnroll);
  const int64_t most = groups < 2048 ? 2048 / groups : 1;
  const Job job = {*state, *batch, *rule, out, NULL, log2};
  const dim3 blocks((unsigned)groups, (unsigned)(heights < most ? heights : most));
  chosen.apply<<<blocks, kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
