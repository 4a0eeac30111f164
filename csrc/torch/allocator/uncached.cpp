#include "uncached.h"

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include "../reporting/profiler.h"

namespace esper
{

void *allocate_uncached(size_t size)
{
  if (size == 0) {
    return nullptr;
  }
  void *ptr = nullptr;
  const cudaError_t status = cudaMalloc(&ptr, size);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ",
                     c10::CachingAllocator::format_size(size), ". GPU ",
                     static_cast<int>(c10::cuda::current_device()),
                     " refused, and esper_alloc's cache is disabled.");
  }
  C10_CUDA_CHECK(status);
  tell_tracer_of_allocation(ptr);
  return ptr;
}

void delete_uncached(void *ptr)
{
  if (ptr == nullptr) {
    return;
  }
  tell_tracer_of_free(ptr);
  // Called by destructors, which must not throw. A sticky error shows at the next call.
  C10_CUDA_CHECK_WARN(cudaFree(ptr));
}

} // namespace esper
