// The normalisers' kernels. One launch computes the moments of a batch, merges them into the state
// and normalises the batch by the new state.
//
// A block handles a group of neighbouring columns, each thread `vector` columns of every height-th
// row. A thread keeps its first rows in registers, so batches of up to some megabytes are read
// once. Batches with few rows have one block for each group of columns, and no block waits for
// another. Batches with many rows are also cut into parts. That launch is cooperative: each block
// writes the moments of its part and, after a barrier of the whole grid, merges all parts of its
// columns itself, in the same order, so all blocks get the same result. There, too, column groups
// stay narrow, because what is read after the barrier grows with the square of a group's blocks.
//
// Double-precision divisions are long chains of dependent instructions, so there are none before a
// column's moments are complete. Rows are counted with integers only.
#include "normalize.h"

#include <atomic>
#include <cooperative_groups.h>
#include <type_traits>

#include "scaling.h"
#include "values.h"

namespace
{

using esper::Arithmetic;
using esper::Line;
using esper::merge;
using esper::Moments;
using esper::number;
using esper::Pack;
using esper::Remembered;
using esper::Scaler;
using esper::store;

constexpr int kThreads = 256;
constexpr int kBlocks = 2;         // of an update, at once on a multiprocessor
constexpr int kMaxColumns = 64;    // of a block
constexpr int kNarrowColumns = 8;  // the values of a sector of memory
constexpr int kHeldBytes = 256;    // bytes of values that a thread of an update keeps
constexpr int kMostHeld = 16;      // the most rows of them
constexpr int kUnroll = 4;         // later rows that a thread loads at once
constexpr int64_t kFewRows = 2048; // with up to this many, a column group has one block
constexpr int kMaxDevices = 64;

// --- what a launch is given --------------------------------------------------

struct Job {
  esper_normalizer_state state;
  esper_normalizer_batch batch;
  esper_normalizer_rule rule;
  void *out;      // NULL: only update the state
  double *parts;  // moments of each block's columns: 4 x padded columns x parts
  int log2_width; // threads beside each other in a row
};

// The values that a thread handles.
template <int V>
struct Place {
  int width, height, lane, row_of_block, columns;
  int64_t first_row, rows_apart;
  int64_t group, column; // first column of the block, of the thread
  bool active;

  __device__ explicit Place(const Job &job)
  {
    width = 1 << job.log2_width;
    height = kThreads >> job.log2_width;
    lane = threadIdx.x & (width - 1);
    row_of_block = threadIdx.x >> job.log2_width;
    columns = width * V;
    first_row = (int64_t)blockIdx.y * height + row_of_block;
    rows_apart = (int64_t)gridDim.y * height;
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
  if (!esper::contributes(number(x)) || (batch.mask && !batch.mask[batch.mask_each ? each : row]))
    return 0.0;
  if (!batch.weights)
    return 1.0;
  const double weight = batch.weights[batch.weights_each ? each : row];
  return isfinite(weight) && weight > 0.0 ? weight : 0.0;
}

template <typename T>
__device__ bool row_counts(const Job &job, int64_t row)
{
  const T *values = static_cast<const T *>(job.batch.values) + row * job.state.features;
  for (int64_t column = 0; column < job.state.features; column++)
    if (weight_of(job, row, column, values[column]) > 0.0)
      return true;
  return false;
}

// --- a thread's rows -----------------------------------------------------------

template <typename T, int V>
constexpr int kFitting = kHeldBytes / (int)sizeof(Pack<T, V>);
template <typename T, int V>
constexpr int kHeld = kFitting<T, V> < kMostHeld ? kFitting<T, V> : kMostHeld;

// A thread's rows. The first N are loaded once, all at the same time; each visit loads the later
// ones.
template <typename T, int V, int N>
class Rows
{
public:
  __device__ Rows(const Job &job, const Place<V> &place)
      : values_(static_cast<const T *>(job.batch.values) + place.column),
        features_(job.state.features), first_(place.first_row),
        last_(place.active ? job.batch.rows : 0), apart_(place.rows_apart)
  {
    count_ = load(first_, held_);
  }

  // Calls visit(row, its values) for each row in order.
  template <typename Visit>
  __device__ void each(Visit visit) const
  {
    visit_all(first_, held_, count_, visit);
    for (int64_t row = first_ + N * apart_; row < last_; row += kUnroll * apart_) {
      Pack<T, V> further[kUnroll];
      const int count = load(row, further);
      visit_all(row, further, count, visit);
    }
  }

private:
  // Returns the number of rows loaded.
  template <int M>
  __device__ int load(int64_t row, Pack<T, V> (&packs)[M]) const
  {
    int count = 0;
    const T *from = values_ + row * features_;
#pragma unroll
    for (int i = 0; i < M; i++, row += apart_, from += apart_ * features_)
      if (row < last_) {
        packs[i] = *reinterpret_cast<const Pack<T, V> *>(from);
        count++;
      }
    return count;
  }

  template <int M, typename Visit>
  __device__ void visit_all(int64_t row, const Pack<T, V> (&packs)[M], int count,
                            Visit &visit) const
  {
#pragma unroll
    for (int i = 0; i < M; i++) {
      if (i >= count)
        break;
      visit(row + i * apart_, packs[i]);
    }
  }

  const T *values_;
  int64_t features_, first_, last_, apart_;
  int count_; // rows held
  Pack<T, V> held_[N];
};

// --- moments of a thread's values, of a block's, of the grid's ----------------

// Returns how many of its rows count, in threads that have the first values of rows.
template <typename T, int V, bool Weighted, int N>
__device__ int64_t add_up(const Job &job, const Place<V> &place, const Rows<T, V, N> &rows,
                          Moments (&moments)[V])
{
  std::conditional_t<Weighted, esper::WeightedSum, esper::Sum> sums[V];
  int seen = 0;
  bool by_first = true; // every row counts, by its first value
  rows.each([&](int64_t row, const Pack<T, V> &pack) {
    seen++;
#pragma unroll
    for (int v = 0; v < V; v++) {
      const auto x = number(pack.of[v]);
      bool counts;
      if constexpr (Weighted) {
        const double weight = weight_of(job, row, place.column + v, pack.of[v]);
        counts = weight > 0.0;
        if (counts)
          sums[v].add(x, weight);
      } else {
        counts = esper::contributes(x);
        sums[v].add(x, counts);
      }
      by_first &= counts || v > 0;
    }
  });
#pragma unroll
  for (int v = 0; v < V; v++)
    moments[v] = sums[v].moments();
  if (place.column != 0)
    return 0;
  if (by_first)
    return seen;
  int64_t counted = 0;
  for (int64_t row = place.first_row; row < job.batch.rows; row += place.rows_apart)
    counted += row_counts<T>(job, row);
  return counted;
}

// Moments in memory, field by field.
struct Table {
  double *fields;
  int64_t size;

  __device__ void write(int64_t at, const Moments &moments) const
  {
    fields[at] = moments.weight;
    fields[size + at] = moments.about;
    fields[2 * size + at] = moments.sum;
    fields[3 * size + at] = moments.squares;
  }

  __device__ Moments read(int64_t at) const
  {
    return Moments{fields[at], fields[size + at], fields[2 * size + at], fields[3 * size + at]};
  }
};

// The threads that merge a column of the block and do its other work: neighbouring threads of one
// warp, as many as there are for each column.
struct Team {
  int size, member;
  int column; // in the block; too high in threads that are left over

  __device__ explicit Team(int columns)
  {
    size = kThreads / columns < 32 ? kThreads / columns : 32;
    member = threadIdx.x % size;
    column = threadIdx.x / size;
  }
};

__device__ Moments from_lane(const Moments &mine, int offset)
{
  return Moments{__shfl_xor_sync(~0u, mine.weight, offset),
                 __shfl_xor_sync(~0u, mine.about, offset), __shfl_xor_sync(~0u, mine.sum, offset),
                 __shfl_xor_sync(~0u, mine.squares, offset)};
}

// Merges `count` entries of the table from `begin` on. Member 0 of the team gets the result.
__device__ Moments merge_all(const Team &team, const Table &table, int64_t begin, int count)
{
  Moments all = esper::no_moments();
#pragma unroll 4
  for (int i = team.member; i < count; i += team.size)
    all = merge(all, table.read(begin + i));
  for (int offset = team.size / 2; offset > 0; offset /= 2)
    all = merge(all, from_lane(all, offset));
  return all;
}

// Merges the block's moments of the team's column.
template <int V>
__device__ Moments merge_block(const Place<V> &place, const Team &team, const Moments (&moments)[V],
                               const Table &table)
{
  const int stride = place.height + 1; // odd, with neighbouring lanes side by side,
#pragma unroll
  for (int v = 0; v < V; v++) // so that each has its own memory banks
    table.write((v * place.width + place.lane) * stride + place.row_of_block, moments[v]);
  __syncthreads();
  if (team.column >= place.columns)
    return esper::no_moments();
  const int at = team.column % V * place.width + team.column / V;
  return merge_all(team, table, at * stride, place.height);
}

// Merges the grid's moments of the team's column. `moments` are the block's.
__device__ Moments merge_grid(const Job &job, const Team &team, int columns, const Moments &moments)
{
  const int64_t parts = gridDim.y;
  const Table table = {job.parts, parts * gridDim.x * columns};
  const int64_t begin = ((int64_t)blockIdx.x * columns + team.column) * parts;
  if (team.column < columns && team.member == 0)
    table.write(begin + blockIdx.y, moments);
  cooperative_groups::this_grid().sync();
  if (team.column >= columns)
    return esper::no_moments();
  return merge_all(team, table, begin, (int)parts);
}

// Adds the warp's rows to the state's count. They are integers, so any order will do.
__device__ void count_rows(const Job &job, int64_t rows)
{
  for (int offset = 16; offset > 0; offset /= 2)
    rows += __shfl_xor_sync(~0u, rows, offset);
  if (threadIdx.x % 32 == 0 && rows > 0)
    atomicAdd(reinterpret_cast<unsigned long long *>(job.state.count), (unsigned long long)rows);
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

template <bool Inverse, typename T, int V, int N>
__device__ void apply(const Job &job, const Place<V> &place, const Rows<T, V, N> &rows,
                      const Line *lines)
{
  using A = typename Arithmetic<T>::type;
  Scaler<A> scalers[V];
#pragma unroll
  for (int v = 0; v < V; v++)
    scalers[v] = Scaler<A>(lines[place.lane * V + v], job.rule);
  const int64_t features = job.state.features;
  A *to = static_cast<A *>(job.out) + place.first_row * features + place.column;
  rows.each([&](int64_t, const Pack<T, V> &pack) {
    Pack<A, V> result;
#pragma unroll
    for (int v = 0; v < V; v++)
      result.of[v] = Inverse ? scalers[v].restored(number(pack.of[v]))
                             : scalers[v].normalized(number(pack.of[v]));
    store(to, result);
    to += place.rows_apart * features;
  });
}

template <typename T, int V, bool Weighted>
__global__ void __launch_bounds__(kThreads, kBlocks) update_kernel(const Job job)
{
  constexpr int size = kThreads * V + kMaxColumns;
  __shared__ double shared[4 * size];
  __shared__ Line lines[kMaxColumns];
  const Place<V> place(job);
  const Team team(place.columns);
  const int64_t column = place.group + team.column;
  const bool keeper =
      team.member == 0 && team.column < place.columns && column < job.state.features;
  const Rows<T, V, kHeld<T, V>> rows(job, place);
  Moments moments[V];
  const int64_t counted = add_up<T, V, Weighted>(job, place, rows, moments);
  // The state is read before the grid's barrier and written after it.
  Remembered old = {0.0, 1.0, 0.0};
  if (keeper)
    old = remembered(job.state, column);
  Moments all = merge_block(place, team, moments, Table{shared, size});
  if (gridDim.y > 1)
    all = merge_grid(job, team, place.columns, all);
  if (keeper) {
    const Remembered now = esper::take_in(old, all, job.rule.momentum, job.rule.warm_up);
    if (blockIdx.y == 0)
      remember(job.state, column, now);
    lines[team.column] = esper::line_of(now, job.rule);
  }
  if (blockIdx.x == 0)
    count_rows(job, counted);
  if (job.out) {
    __syncthreads();
    apply<false>(job, place, rows, lines);
  }
}

template <typename T, int V>
__global__ void __launch_bounds__(kThreads) apply_kernel(const Job job)
{
  __shared__ Line lines[kMaxColumns];
  const Place<V> place(job);
  const Rows<T, V, kUnroll> rows(job, place);
  const int64_t mine = place.group + threadIdx.x;
  if ((int)threadIdx.x < place.columns && mine < job.state.features)
    lines[threadIdx.x] = esper::line_of(remembered(job.state, mine), job.rule);
  __syncthreads();
  if (job.rule.inverse)
    apply<true>(job, place, rows, lines);
  else
    apply<false>(job, place, rows, lines);
}

// --- launching ---------------------------------------------------------------

using Kernel = void (*)(Job);

// How a batch is laid out over threads.
struct Layout {
  Kernel update, apply;
  int vector;
  std::atomic<int> *resident; // for each device, blocks of `update` that fit at once; 0: unknown
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

// The log2 of a row's threads for this many columns, or for all features if they are fewer.
int choose_log2_width(const Layout &chosen, int64_t features, int columns)
{
  const int64_t wanted = features < columns ? features : columns;
  int log2 = 0;
  while (((int64_t)chosen.vector << log2) < wanted)
    log2++;
  return log2;
}

// Columns of an update's block: few, for there to be many blocks; more where the block
// would have more rows of threads than there are rows. Several blocks of a column group
// have two sectors of a row each, which processors read faster than one.
int choose_columns(const Layout &chosen, int64_t rows)
{
  int columns = rows > kFewRows ? 2 * kNarrowColumns : kNarrowColumns;
  while (columns < kMaxColumns && kThreads * chosen.vector / columns > rows)
    columns *= 2;
  return columns;
}

// The blocks of the kernel that run at once on the current device; 1 if it has no grid barrier.
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
  const int log2 = choose_log2_width(chosen, features, choose_columns(chosen, rows));
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
    return 0; // the launch will return the same error
  const size_t padded = (size_t)grid.blocks.x * ((size_t)chosen.vector << grid.log2_width);
  return 4 * padded * grid.blocks.y;
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
    cudaGetLastError(); // part of the device is in use: one block for each column group
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
  const int log2 = choose_log2_width(chosen, state->features, kMaxColumns);
  const int64_t groups = divide_up(state->features, (int64_t)chosen.vector << log2);
  const int64_t heights = divide_up(batch->rows, (int64_t)(kThreads >> log2) * kUnroll);
  const int64_t most = groups < 2048 ? 2048 / groups : 1;
  const Job job = {*state, *batch, *rule, out, NULL, log2};
  const dim3 blocks((unsigned)groups, (unsigned)(heights < most ? heights : most));
  chosen.apply<<<blocks, kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}
