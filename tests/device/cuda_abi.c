/* cuda_abi.c: compares csrc/device/cuda/api.h with the real cuda.h. Compiled
 * and run twice, with and without -DWITH_CUDA_H: the two must print the same.
 * With it, the compiler compares every function's type with the one that
 * cudaTypedefs.h has for that name and version. */
#ifdef WITH_CUDA_H
#include <cuda.h>
#include <cudaTypedefs.h>
#endif
#include <stdio.h>

#include "../../csrc/device/cuda/api.h"

#ifdef WITH_CUDA_H
#define SAME_TYPE(name, version, need, parameters)                               \
  _Static_assert(__builtin_types_compatible_p(__typeof__(((cuda_api *)0)->name), \
                                              PFN_##name##_v##version),          \
                 #name " has another signature in version " #version);
CUDA_ENTRY_POINTS(SAME_TYPE)
_Static_assert(__builtin_types_compatible_p(cuda_get_proc_address_v1, PFN_cuGetProcAddress_v11030),
               "cuGetProcAddress");
_Static_assert(__builtin_types_compatible_p(cuda_get_proc_address_v2, PFN_cuGetProcAddress_v12000),
               "cuGetProcAddress_v2");
#endif

#define SIZE(type) printf("sizeof %s = %zu\n", #type, sizeof(type))
#define OFFSET(type, member)                                                  \
  printf("%s.%s at %zu, %zu bytes\n", #type, #member, offsetof(type, member), \
         sizeof(((type *)0)->member))

int main(void)
{
#define PRINT(name, value) printf("%s = %d, said to be %d\n", #name, (int)name, value);
  CUDA_CONSTANTS(PRINT)
  SIZE(CUresult);
  SIZE(CUdevice);
  SIZE(CUdeviceptr);
  SIZE(CUdevice_attribute);
  SIZE(CUstreamCaptureMode);
  SIZE(CUstreamCaptureStatus);
  SIZE(CUmemAllocationGranularity_flags);
  SIZE(CUmemAllocationHandleType);
  SIZE(CUmemGenericAllocationHandle);
  SIZE(CUdriverProcAddressQueryResult);
  SIZE(CUmemLocation);
  OFFSET(CUmemLocation, type);
  OFFSET(CUmemLocation, id);
  SIZE(CUmemAllocationProp);
  OFFSET(CUmemAllocationProp, type);
  OFFSET(CUmemAllocationProp, requestedHandleTypes);
  OFFSET(CUmemAllocationProp, location);
  OFFSET(CUmemAllocationProp, win32HandleMetaData);
  OFFSET(CUmemAllocationProp, allocFlags.compressionType);
  OFFSET(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
  OFFSET(CUmemAllocationProp, allocFlags.usage);
  SIZE(CUmemAccessDesc);
  OFFSET(CUmemAccessDesc, location);
  OFFSET(CUmemAccessDesc, flags);
  return 0;
}
