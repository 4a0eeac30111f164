/* api.h: the part of the CUDA driver's interface that is used, declared here so that the core
 * builds without a CUDA toolkit. The driver promises never to change a (name, version) pair,
 * whatever the toolkit's headers map a plain name to. A test includes the real cuda.h first, if
 * there is one, and compares everything with it. */
#ifndef ESPER_CUDA_API_H
#define ESPER_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

/* C(name, value) */
#define CUDA_CONSTANTS(C)                                                 \
  C(CUDA_SUCCESS, 0)                                                      \
  C(CUDA_ERROR_INVALID_VALUE, 1)                                          \
  C(CUDA_ERROR_OUT_OF_MEMORY, 2)                                          \
  C(CUDA_ERROR_NOT_INITIALIZED, 3)                                        \
  C(CUDA_ERROR_DEINITIALIZED, 4)                                          \
  C(CUDA_ERROR_STUB_LIBRARY, 34)                                          \
  C(CUDA_ERROR_NO_DEVICE, 100)                                            \
  C(CUDA_ERROR_INVALID_DEVICE, 101)                                       \
  C(CUDA_ERROR_INVALID_CONTEXT, 201)                                      \
  C(CUDA_ERROR_NOT_FOUND, 500)                                            \
  C(CUDA_ERROR_NOT_READY, 600)                                            \
  C(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)                                 \
  C(CUDA_ERROR_OPERATING_SYSTEM, 304)                                     \
  C(CUDA_ERROR_NOT_PERMITTED, 800)                                        \
  C(CUDA_ERROR_NOT_SUPPORTED, 801)                                        \
  C(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)                           \
  C(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908)                          \
  C(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                     \
  C(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                     \
  C(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)         \
  C(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103) \
  C(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 110)     \
  C(CU_EVENT_DISABLE_TIMING, 2)                                           \
  C(CU_STREAM_NON_BLOCKING, 1)                                            \
  C(CU_STREAM_CAPTURE_MODE_RELAXED, 2)                                    \
  C(CU_STREAM_CAPTURE_STATUS_NONE, 0)                                     \
  C(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)                                   \
  C(CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                     \
  C(CU_MEM_LOCATION_TYPE_DEVICE, 1)                                       \
  C(CU_MEM_HANDLE_TYPE_NONE, 0)                                           \
  C(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1)                          \
  C(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3)                                \
  C(CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0)                                  \
  C(CU_GET_PROC_ADDRESS_LEGACY_STREAM, 1)

#ifndef CUDA_VERSION /* defined by the real cuda.h */

typedef int CUresult;
typedef int CUdevice;
typedef int CUdevice_attribute;
typedef int CUstreamCaptureMode;
typedef int CUstreamCaptureStatus;
typedef int CUmemAllocationGranularity_flags;
typedef int CUmemAllocationHandleType;
typedef int CUdriverProcAddressQueryResult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef uint64_t cuuint64_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;

typedef struct CUmemLocation {
  int type;
  int id;
} CUmemLocation;

typedef struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
} CUmemAccessDesc;

enum {
#define CUDA_CONSTANT(name, value) name = value,
  CUDA_CONSTANTS(CUDA_CONSTANT)
#undef CUDA_CONSTANT
};

#endif /* CUDA_VERSION */

/* The entry points, all returning CUresult. E(name, version, need, parameters): `version` is the
 * driver version that introduced this signature; cuGetProcAddress is asked for it. `need` is
 * REQUIRED or OPTIONAL: without an OPTIONAL one, what depends on it returns ESPER_UNSUPPORTED. */
#define CUDA_ENTRY_POINTS(E)                                                                      \
  E(cuInit, 2000, REQUIRED, (unsigned int))                                                       \
  E(cuDriverGetVersion, 2020, REQUIRED, (int *))                                                  \
  E(cuGetErrorName, 6000, REQUIRED, (CUresult, const char **))                                    \
  E(cuGetErrorString, 6000, REQUIRED, (CUresult, const char **))                                  \
  E(cuDeviceGetCount, 2000, REQUIRED, (int *))                                                    \
  E(cuDeviceGet, 2000, REQUIRED, (CUdevice *, int))                                               \
  E(cuDeviceGetName, 2000, REQUIRED, (char *, int, CUdevice))                                     \
  E(cuDeviceGetAttribute, 2000, REQUIRED, (int *, CUdevice_attribute, CUdevice))                  \
  E(cuDeviceTotalMem, 3020, REQUIRED, (size_t *, CUdevice))                                       \
  E(cuDevicePrimaryCtxRetain, 7000, REQUIRED, (CUcontext *, CUdevice))                            \
  E(cuCtxGetCurrent, 4000, REQUIRED, (CUcontext *))                                               \
  E(cuCtxPushCurrent, 4000, REQUIRED, (CUcontext))                                                \
  E(cuCtxPopCurrent, 4000, REQUIRED, (CUcontext *))                                               \
  E(cuCtxGetDevice, 2000, REQUIRED, (CUdevice *))                                                 \
  E(cuCtxSynchronize, 2000, REQUIRED, (void))                                                     \
  E(cuThreadExchangeStreamCaptureMode, 10010, REQUIRED, (CUstreamCaptureMode *))                  \
  E(cuMemGetInfo, 3020, REQUIRED, (size_t *, size_t *))                                           \
  E(cuMemAlloc, 3020, REQUIRED, (CUdeviceptr *, size_t))                                          \
  E(cuMemFree, 3020, REQUIRED, (CUdeviceptr))                                                     \
  E(cuMemHostAlloc, 2020, REQUIRED, (void **, size_t, unsigned int))                              \
  E(cuMemFreeHost, 2000, REQUIRED, (void *))                                                      \
  E(cuMemcpyDtoHAsync, 3020, REQUIRED, (void *, CUdeviceptr, size_t, CUstream))                   \
  E(cuMemcpyHtoDAsync, 3020, REQUIRED, (CUdeviceptr, const void *, size_t, CUstream))             \
  E(cuMemsetD8Async, 3020, REQUIRED, (CUdeviceptr, unsigned char, size_t, CUstream))              \
  E(cuStreamIsCapturing, 10000, REQUIRED, (CUstream, CUstreamCaptureStatus *))                    \
  E(cuStreamGetCaptureInfo, 11030, REQUIRED,                                                      \
    (CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *)) \
  E(cuStreamGetCtx, 9020, REQUIRED, (CUstream, CUcontext *))                                      \
  E(cuStreamCreate, 2000, REQUIRED, (CUstream *, unsigned int))                                   \
  E(cuStreamDestroy, 4000, REQUIRED, (CUstream))                                                  \
  E(cuStreamWaitEvent, 3020, REQUIRED, (CUstream, CUevent, unsigned int))                         \
  E(cuGraphNodeGetDependencies, 10000, OPTIONAL, (CUgraphNode, CUgraphNode *, size_t *))          \
  E(cuEventCreate, 2000, REQUIRED, (CUevent *, unsigned int))                                     \
  E(cuEventDestroy, 4000, REQUIRED, (CUevent))                                                    \
  E(cuEventRecord, 2000, REQUIRED, (CUevent, CUstream))                                           \
  E(cuEventQuery, 2000, REQUIRED, (CUevent))                                                      \
  E(cuEventSynchronize, 2000, REQUIRED, (CUevent))                                                \
  E(cuStreamGetId, 12000, OPTIONAL, (CUstream, unsigned long long *))                             \
  E(cuCtxRecordEvent, 12050, OPTIONAL, (CUcontext, CUevent))                                      \
  E(cuDeviceCanAccessPeer, 4000, OPTIONAL, (int *, CUdevice, CUdevice))                           \
  E(cuMemGetAllocationGranularity, 10020, OPTIONAL,                                               \
    (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags))                    \
  E(cuMemAddressReserve, 10020, OPTIONAL,                                                         \
    (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                             \
  E(cuMemAddressFree, 10020, OPTIONAL, (CUdeviceptr, size_t))                                     \
  E(cuMemCreate, 10020, OPTIONAL,                                                                 \
    (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))    \
  E(cuMemRelease, 10020, OPTIONAL, (CUmemGenericAllocationHandle))                                \
  E(cuMemMap, 10020, OPTIONAL,                                                                    \
    (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))              \
  E(cuMemUnmap, 10020, OPTIONAL, (CUdeviceptr, size_t))                                           \
  E(cuMemExportToShareableHandle, 10020, OPTIONAL,                                                \
    (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long))        \
  E(cuMemImportFromShareableHandle, 10020, OPTIONAL,                                              \
    (CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType))                          \
  E(cuMemSetAccess, 10020, OPTIONAL, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))

/* The two versions of the function that finds all others. */
typedef CUresult (*cuda_get_proc_address_v1)(const char *, void **, int, cuuint64_t);
typedef CUresult (*cuda_get_proc_address_v2)(const char *, void **, int, cuuint64_t,
                                             CUdriverProcAddressQueryResult *);

typedef struct cuda_api {
#define CUDA_POINTER(name, version, need, parameters) CUresult(*name) parameters;
  CUDA_ENTRY_POINTS(CUDA_POINTER)
#undef CUDA_POINTER
} cuda_api;

#endif
