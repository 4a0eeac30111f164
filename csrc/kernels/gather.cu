#include "gather.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <string.h>

namespace
{

typedef esper_gather_batch Batch;
typedef esper_gather_column Column;
typedef esper_divisor Divisor;

constexpr uint32_t kThreads = 256;
constexpr uint32_t kUnitsEach = 4; // loads that a thread has in flight
constexpr uint32_t kTile = kThreads * kUnitsEach;
// Tables of up to this many channels are copied to shared memory.
constexpr uint32_t kSharedChannels = 8;

// Everything that a launch needs, as its parameter, so that all threads read it from constant
// memory.
struct Parameters {
  Batch batch;
  Column columns[ESPER_GATHER_COLUMNS];
  void *destinations[ESPER_GATHER_DESTINATIONS];
};
static_assert(sizeof(Parameters) <= 4096, "more than every GPU and driver takes");

// The same in device memory.
struct Remote {
  Batch batch;
  const Column *columns;
  void *const *destinations;
};

__device__ __forceinline__ uint32_t divide(uint32_t x, const Divisor &d)
{
  return (__umulhi(x, d.multiplier) + x) >> d.shift;
}

// Returns the quotient; x becomes the remainder.
__device__ __forceinline__ uint32_t split(uint32_t &x, const Divisor &d)
{
  const uint32_t quotient = divide(x, d);
  x -= quotient * d.by;
  return quotient;
}

__device__ __forceinline__ int64_t sample_of(const Batch &batch, uint32_t row)
{
  const int64_t at = batch.start + row;
  return batch.order != nullptr ? __ldg(batch.order + at) : batch.offset + at;
}

// Where a row of a column goes.
template <typename P>
__device__ __forceinline__ char *destination(const P &p, uint32_t column, uint32_t row,
                                             uint32_t row_bytes)
{
  const Batch &batch = p.batch;
  const uint32_t cut = batch.larger * (batch.size + 1);
  uint32_t within = row;
  uint32_t environment;
  if (row < cut) {
    environment = split(within, batch.by_larger_size);
  } else {
    within -= cut;
    environment = batch.larger + split(within, batch.by_size);
  }
  char *base = static_cast<char *>(p.destinations[environment * batch.columns + column]);
  return base + static_cast<size_t>(within) * row_bytes;
}

// Rows as they are

template <typename Unit, typename P>
__device__ __forceinline__ void copy_tile(const P &p, uint32_t index, uint32_t tile)
{
  const Column &column = p.columns[index];
  const uint32_t units = p.batch.rows * column.row_units.by;
  const uint32_t first = tile * kTile + threadIdx.x;
  const char *source = static_cast<const char *>(column.source);
  Unit held[kUnitsEach];
  uint32_t rows[kUnitsEach], units_in[kUnitsEach];
#pragma unroll
  for (uint32_t i = 0; i < kUnitsEach; i++) {
    const uint32_t unit = first + i * kThreads;
    if (unit < units) {
      units_in[i] = unit;
      rows[i] = split(units_in[i], column.row_units);
      const int64_t sample = sample_of(p.batch, rows[i]);
      const char *row = source + sample * column.row_bytes;
      held[i] = __ldg(reinterpret_cast<const Unit *>(row) + units_in[i]);
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kUnitsEach; i++) {
    if (first + i * kThreads < units) {
      char *row = destination(p, index, rows[i], static_cast<uint32_t>(column.row_bytes));
      reinterpret_cast<Unit *>(row)[units_in[i]] = held[i];
    }
  }
}

// Element by element

template <typename R>
__device__ __forceinline__ R result(float x);
template <>
__device__ __forceinline__ uint8_t result<uint8_t>(float x)
{
  return static_cast<uint8_t>(x);
}
template <>
__device__ __forceinline__ __half result<__half>(float x)
{
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 result<__nv_bfloat16>(float x)
{
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ float result<float>(float x)
{
  return x;
}

// What a value of the source becomes before its conversion. Every operation is rounded as PyTorch
// rounds it.
struct Bytes {
  const uint8_t *image;
  const float *table; // [channels, 256]; null: values are kept

  __device__ __forceinline__ float operator()(uint32_t at, uint32_t channel) const
  {
    return value(__ldg(image + at), channel);
  }
  __device__ __forceinline__ float outside(uint32_t channel) const
  {
    return value(0, channel);
  }
  __device__ __forceinline__ float value(uint8_t x, uint32_t channel) const
  {
    return table == nullptr ? static_cast<float>(x) : table[channel * 256 + x];
  }
};

struct Floats {
  const void *image;
  const float *constants; // the channels' means, then their stds; or null
  uint32_t channels;
  uint8_t type;

  __device__ __forceinline__ float operator()(uint32_t at, uint32_t channel) const
  {
    switch (type) {
    case ESPER_GATHER_F32: return value(__ldg(static_cast<const float *>(image) + at), channel);
    case ESPER_GATHER_F16:
      return value(__half2float(__ldg(static_cast<const __half *>(image) + at)), channel);
    default:
      return value(__bfloat162float(__ldg(static_cast<const __nv_bfloat16 *>(image) + at)),
                   channel);
    }
  }
  __device__ __forceinline__ float outside(uint32_t channel) const
  {
    return value(0.0f, channel);
  }
  __device__ __forceinline__ float value(float x, uint32_t channel) const
  {
    if (constants == nullptr) {
      return x;
    }
    const float mean = __ldg(constants + channel), std = __ldg(constants + channels + channel);
    return __fdiv_rn(__fsub_rn(x, mean), std);
  }
};

__device__ __forceinline__ Bytes source_of(const Column &, const char *image,
                                           const float *constants, uint8_t)
{
  return {reinterpret_cast<const uint8_t *>(image), constants};
}
__device__ __forceinline__ Floats source_of(const Column &column, const char *image,
                                            const float *constants, float)
{
  return {image, constants, column.channels.by, column.source_type};
}

// The finaliser of splitmix64, as mix() in esper_alloc/helpers/gather/plan.py.
__device__ __forceinline__ uint64_t mix(uint64_t x)
{
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// A sample's window and whether it is flipped, as crop_and_flip() in transform.py.
struct Window {
  int32_t top, left;
  bool flip;
};

__device__ __forceinline__ Window window_of(const Column &column, uint64_t seed, int64_t sample)
{
  const uint64_t hash = mix(seed + (static_cast<uint64_t>(sample) + 1) * 0x9E3779B97F4A7C15ull);
  const uint64_t mask = (1u << ESPER_GATHER_WINDOW_BITS) - 1;
  const uint64_t places = 2 * column.crop + 1;
  Window window;
  window.top = static_cast<int32_t>(((hash & mask) * places) >> ESPER_GATHER_WINDOW_BITS);
  window.left = static_cast<int32_t>((((hash >> ESPER_GATHER_WINDOW_BITS) & mask) * places) >>
                                     ESPER_GATHER_WINDOW_BITS);
  window.flip = (hash >> (2 * ESPER_GATHER_WINDOW_BITS)) < column.flip_threshold;
  return window;
}

// A position in an image, which advances in the order of the result's elements.
struct Place {
  uint32_t channel, height, width;

  __device__ __forceinline__ Place(const Column &column, uint32_t element)
  {
    if (column.result_last) {
      uint32_t pixel = split(element, column.channels);
      channel = element;
      height = split(pixel, column.width);
      width = pixel;
    } else {
      uint32_t line = split(element, column.width);
      width = element;
      channel = split(line, column.height);
      height = line;
    }
  }

  __device__ __forceinline__ void next(const Column &column)
  {
    if (column.result_last) {
      if (++channel < column.channels.by) {
        return;
      }
      channel = 0;
    }
    if (++width < column.width.by) {
      return;
    }
    width = 0;
    if (++height < column.height.by) {
      return;
    }
    height = 0;
    channel++;
  }
};

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T values[N];
};

// S is uint8_t, or float for all three types of floats.
template <typename S, typename R, int N, typename P>
__device__ __forceinline__ void convert_tile(const P &p, uint32_t index, uint32_t tile,
                                             const float *constants)
{
  const Column &column = p.columns[index];
  const uint32_t units = p.batch.rows * column.row_units.by;
  const uint32_t height = column.height.by, width = column.width.by;
  const bool moves = column.crop != 0 || column.flip_threshold != 0;
  const bool straight = !moves && column.source_last == column.result_last;
#pragma unroll 1
  for (uint32_t i = 0; i < kUnitsEach; i++) {
    uint32_t unit = tile * kTile + threadIdx.x + i * kThreads;
    if (unit >= units) {
      return;
    }
    const uint32_t row = split(unit, column.row_units);
    const int64_t sample = sample_of(p.batch, row);
    const char *image = static_cast<const char *>(column.source) + sample * column.row_bytes;
    const auto source = source_of(column, image, constants, S());
    Place place(column, unit * N);
    Pack<R, N> pack;
    if (straight && sizeof(S) == 1) { // all bytes in one load
      const Pack<uint8_t, N> bytes = reinterpret_cast<const Pack<uint8_t, N> *>(image)[unit];
#pragma unroll
      for (int j = 0; j < N; j++) {
        pack.values[j] = result<R>(source.value(bytes.values[j], place.channel));
        place.next(column);
      }
    } else if (straight) {
#pragma unroll
      for (int j = 0; j < N; j++) {
        pack.values[j] = result<R>(source(unit * N + j, place.channel));
        place.next(column);
      }
    } else {
      const Window window = moves ? window_of(column, p.batch.seed, sample) : Window{0, 0, false};
#pragma unroll
      for (int j = 0; j < N; j++) {
        // A negative number becomes a large one, so it is outside, too.
        const uint32_t h = place.height + window.top - column.crop;
        const uint32_t across = window.flip ? width - 1 - place.width : place.width;
        const uint32_t w = across + window.left - column.crop;
        float value;
        if (h < height && w < width) {
          const uint32_t at = column.source_last
                                  ? (h * width + w) * column.channels.by + place.channel
                                  : (place.channel * height + h) * width + w;
          value = source(at, place.channel);
        } else {
          value = source.outside(place.channel);
        }
        pack.values[j] = result<R>(value);
        place.next(column);
      }
    }
    const uint32_t row_bytes = column.row_units.by * static_cast<uint32_t>(sizeof(pack));
    reinterpret_cast<Pack<R, N> *>(destination(p, index, row, row_bytes))[unit] = pack;
  }
}

template <typename S, typename R, typename P>
__device__ __forceinline__ void convert_units(const P &p, uint32_t index, uint32_t tile,
                                              const float *constants)
{
  if (p.columns[index].unit_bytes == 16) {
    convert_tile<S, R, 16 / sizeof(R)>(p, index, tile, constants);
  } else {
    convert_tile<S, R, 1>(p, index, tile, constants);
  }
}

template <typename S, typename P>
__device__ __forceinline__ void convert_from(const P &p, uint32_t index, uint32_t tile,
                                             const float *constants)
{
  switch (p.columns[index].result_type) {
  case ESPER_GATHER_F32: return convert_units<S, float>(p, index, tile, constants);
  case ESPER_GATHER_F16: return convert_units<S, __half>(p, index, tile, constants);
  case ESPER_GATHER_BF16: return convert_units<S, __nv_bfloat16>(p, index, tile, constants);
  default: // bytes that are only moved
    if (sizeof(S) == 1) {
      convert_units<S, uint8_t>(p, index, tile, constants);
    }
  }
}

template <typename P>
__device__ __forceinline__ void convert(const P &p, uint32_t index, uint32_t tile)
{
  extern __shared__ float table[];
  const Column &column = p.columns[index];
  const float *constants = column.constants;
  if (column.source_type != ESPER_GATHER_U8) {
    return convert_from<float>(p, index, tile, constants);
  }
  if (constants != nullptr && column.channels.by <= kSharedChannels) {
    for (uint32_t i = threadIdx.x; i < column.channels.by * 256; i += kThreads) {
      table[i] = __ldg(constants + i);
    }
    __syncthreads(); // all threads of the block have the same column
    constants = table;
  }
  convert_from<uint8_t>(p, index, tile, constants);
}

template <typename P>
__global__ void __launch_bounds__(kThreads, 4) gather(const __grid_constant__ P p)
{
  uint32_t index = 0;
  while (index + 1 < p.batch.columns && blockIdx.x >= p.columns[index + 1].first_block) {
    index++;
  }
  const Column &column = p.columns[index];
  const uint32_t tile = blockIdx.x - column.first_block;
  if (column.kind == ESPER_GATHER_CONVERT) {
    return convert(p, index, tile);
  }
  switch (column.unit_bytes) {
  case 16: return copy_tile<uint4>(p, index, tile);
  case 8: return copy_tile<uint2>(p, index, tile);
  case 4: return copy_tile<uint32_t>(p, index, tile);
  case 2: return copy_tile<uint16_t>(p, index, tile);
  default: return copy_tile<uint8_t>(p, index, tile);
  }
}

// Assigns blocks to each column. Returns their number, and how much shared memory they need.
uint32_t deal_blocks(const Batch &batch, Column *columns, uint32_t &shared_bytes)
{
  uint32_t blocks = 0;
  shared_bytes = 0;
  for (uint32_t i = 0; i < batch.columns; i++) {
    Column &column = columns[i];
    column.first_block = blocks;
    const uint32_t units = batch.rows * column.row_units.by;
    blocks += (units + kTile - 1) / kTile;
    const bool tabled = column.kind == ESPER_GATHER_CONVERT && column.constants != nullptr &&
                        column.source_type == ESPER_GATHER_U8 &&
                        column.channels.by <= kSharedChannels;
    const uint32_t bytes = tabled ? column.channels.by * 256 * sizeof(float) : 0;
    shared_bytes = bytes > shared_bytes ? bytes : shared_bytes;
  }
  return blocks;
}

} // namespace

// Granlund and Montgomery, "Division by invariant integers using multiplication", 1994.
extern "C" esper_divisor esper_divisor_of(uint32_t by)
{
  Divisor found = {by == 0 ? 1 : by, 0, 0};
  while ((1ull << found.shift) < found.by) {
    found.shift++;
  }
  const uint64_t rest = (1ull << found.shift) - found.by;
  found.multiplier = static_cast<uint32_t>((rest << 32) / found.by + 1);
  return found;
}

extern "C" size_t esper_gather_remote_bytes(uint32_t columns, uint32_t environments)
{
  if (columns <= ESPER_GATHER_COLUMNS &&
      static_cast<uint64_t>(columns) * environments <= ESPER_GATHER_DESTINATIONS) {
    return 0;
  }
  return columns * (sizeof(Column) + static_cast<size_t>(environments) * sizeof(void *));
}

extern "C" cudaError_t esper_gather_launch(esper_gather_batch *batch, esper_gather_column *columns,
                                           void *const *destinations, void *remote, void *staging,
                                           cudaStream_t stream)
{
  batch->rows = batch->environments * batch->size + batch->larger;
  batch->by_size = esper_divisor_of(batch->size);
  batch->by_larger_size = esper_divisor_of(batch->size + 1);
  uint32_t shared_bytes;
  const uint32_t blocks = deal_blocks(*batch, columns, shared_bytes);
  if (blocks == 0) {
    return cudaSuccess;
  }
  const size_t columns_bytes = batch->columns * sizeof(Column);
  const size_t destinations_bytes =
      static_cast<size_t>(batch->columns) * batch->environments * sizeof(void *);
  if (esper_gather_remote_bytes(batch->columns, batch->environments) == 0) {
    Parameters p;
    p.batch = *batch;
    memcpy(p.columns, columns, columns_bytes);
    memcpy(p.destinations, destinations, destinations_bytes);
    gather<<<blocks, kThreads, shared_bytes, stream>>>(p);
    return cudaGetLastError();
  }
  memcpy(staging, columns, columns_bytes);
  memcpy(static_cast<char *>(staging) + columns_bytes, destinations, destinations_bytes);
  const cudaError_t error = cudaMemcpyAsync(remote, staging, columns_bytes + destinations_bytes,
                                            cudaMemcpyHostToDevice, stream);
  if (error != cudaSuccess) {
    return error;
  }
  Remote p;
  p.batch = *batch;
  p.columns = static_cast<const Column *>(remote);
  p.destinations = reinterpret_cast<void *const *>(static_cast<char *>(remote) + columns_bytes);
  gather<<<blocks, kThreads, shared_bytes, stream>>>(p);
  return cudaGetLastError();
}
