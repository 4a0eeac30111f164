// Memory straight from the CUDA runtime, for caching_allocator_enable(False)
// and PYTORCH_NO_CUDA_MEMORY_CACHING, which tools such as compute-sanitizer
// ask for.
#pragma once

#include <cstddef>

namespace esper
{

// On the current device. Zero bytes: null.
void *allocate_uncached(size_t size);
void delete_uncached(void *ptr);

} // namespace esper
