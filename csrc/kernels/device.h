/* Which GPUs the kernels here can run on.
 *
 * Kernels are compiled for the GPUs that were known when they were built; another one
 * has no code that it can run. Asked once a device, so that the helpers can fall back
 * to PyTorch's own operations and say so.
 */
#ifndef ESPER_KERNELS_DEVICE_H
#define ESPER_KERNELS_DEVICE_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cudaSuccess if the current device can run what was compiled here,
 * cudaErrorNoKernelImageForDevice or another error if not. Launches nothing. */
cudaError_t esper_kernels_run_here(void);

#ifdef __cplusplus
}
#endif

#endif
