/* poison.h: finds on the GPU where poisoned memory was overwritten. */
#ifndef ESPER_KERNELS_POISON_H
#define ESPER_KERNELS_POISON_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Enqueued on `stream`: lowers *least to the least offset in `memory` of 16 bytes that are not all
 * `byte`. `memory` and `size` are multiples of 16. *least is page-locked host memory. Fails, with
 * no error left behind, where the current device cannot run it. */
cudaError_t esper_poison_search(const void *memory, size_t size, unsigned char byte,
                                unsigned long long *least, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
