/* device.h: whether a GPU can run the kernels in this folder.
 *
 * Kernels are compiled for the GPUs known at the time, and other GPUs have no code to run. The
 * helpers ask once for each device, so that they can use PyTorch's own operations instead and say
 * so. */
#ifndef ESPER_KERNELS_DEVICE_H
#define ESPER_KERNELS_DEVICE_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cudaSuccess if the current device can run these kernels, otherwise
 * cudaErrorNoKernelImageForDevice or another error. Launches nothing. */
cudaError_t esper_kernels_run_here(void);

#ifdef __cplusplus
}
#endif

#endif
