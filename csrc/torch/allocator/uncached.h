// Memory directly from the CUDA runtime, for caching_allocator_enable(False) and for
// PYTORCH_NO_CUDA_MEMORY_CACHING, which tools such as compute-sanitizer need.
#pragma once

#include <cstddef>

namespace esper
{

// Allocates on the current device. Null for zero bytes.
void *allocate_uncached(size_t size);
void delete_uncached(void *ptr);

} // namespace esper
