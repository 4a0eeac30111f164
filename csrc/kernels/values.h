// The values of a batch: their arithmetic type, and storing neighbouring ones.
#ifndef ESPER_VALUES_H
#define ESPER_VALUES_H

#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace esper
{

template <typename T>
struct Arithmetic {
  using type = float; // also of the results
};
template <>
struct Arithmetic<double> {
  using type = double;
};

inline __device__ float number(float x)
{
  return x;
}
inline __device__ double number(double x)
{
  return x;
}
inline __device__ float number(__half x)
{
  return __half2float(x);
}
inline __device__ float number(__nv_bfloat16 x)
{
  return __bfloat162float(x);
}

template <typename T, int N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Pack {
  T of[N];
};

// Stores in words of 16 bytes. From an assignment the compiler would make one store for each value.
template <typename T, int N>
__device__ void store(T *to, const Pack<T, N> &pack)
{
  constexpr int words = sizeof(pack) / sizeof(int4);
  if constexpr (words == 0) {
    *reinterpret_cast<Pack<T, N> *>(to) = pack;
  } else {
    int4 parts[words];
    memcpy(parts, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < words; i++)
      __stwb(reinterpret_cast<int4 *>(to) + i, parts[i]);
  }
}

} // namespace esper

#endif
