// Poison: memory is filled when it becomes reusable, and checked when it is handed out again.
//
// A stream that still reads freed memory then reads NaN, and one that still writes it is caught.
// Filled are blocks of the default pool in classic segments, whose addresses keep their memory. The
// fill is work of the home stream or, if the block is marked for other streams, of a stream that
// waits for all of them. A check reads the memory, by a kernel if there is one, and otherwise on
// the host. The host waits for it in any case.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../base/python_objects.h"
#include "../base/watchers.h"

namespace esper
{

namespace poison
{

// Filled memory that was written before it was handed out again.
struct LateWrite {
  uintptr_t address; // of the first byte that is no poison
  uintptr_t block;   // that was freed
  size_t size;
  int device;
  cudaStream_t home;
  uint32_t allocated, freed, handed_out; // sites
};

// esper_poison_search() of csrc/kernels/poison.h.
using Search = cudaError_t (*)(const void *memory, size_t size, unsigned char byte,
                               unsigned long long *least, cudaStream_t stream);

// Begins, and calls `report` for what is caught, in the thread that is handed the memory; null:
// ends. Without `search` the host reads all memory.
void turn_on(void (*report)(const LateWrite &), Search search);

namespace detail
{
void after_malloc(void *ptr, cudaStream_t stream, int device);
void before_free(void *ptr);
} // namespace detail

inline bool is_on()
{
  return is_watched_by(Watcher::POISON);
}

// A live block is marked for another stream. `unknown`: until an event, or for all streams; its
// memory is not filled then.
void marked(const void *ptr, c10::cuda::CUDAStream stream);
void marked_for_unknown(const void *ptr);

// To be called when the core has handed out a block, and before it is given one back.
inline void after_malloc(void *ptr, cudaStream_t stream, int device)
{
  if (is_on()) {
    detail::after_malloc(ptr, stream, device);
  }
}
inline void before_free(void *ptr)
{
  if (is_on()) {
    detail::before_free(ptr);
  }
}

} // namespace poison

} // namespace esper
