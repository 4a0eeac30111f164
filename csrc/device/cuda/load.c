/* load.c: opens libcuda and finds the devices, once in a process. */
#include "load.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda.h"
#include "devices.h"
#include "entry_points.h"
#include "failure.h"

const char *esper_cuda_library(void)
{
  const char *name = getenv("ESPER_ALLOC_LIBCUDA");
  return name && *name ? name : "libcuda.so.1";
}

/* Finds one entry point, with the newer version of cuGetProcAddress if there is one, because only
 * that knows the flags of CUDA 12. */
static void entry_find(void *library, int index)
{
  cuda_get_proc_address_v2 get_v2;
  cuda_get_proc_address_v1 get_v1;
  void **slot = cuda_entry_slot(index);
  CUdriverProcAddressQueryResult answer = 0;
  CUresult result = CUDA_ERROR_NOT_FOUND;
  /* Through void *, because ISO C cannot cast data to function pointers. */
  *(void **)&get_v2 = dlsym(library, "cuGetProcAddress_v2");
  *(void **)&get_v1 = dlsym(library, "cuGetProcAddress");
  if (get_v2)
    result = get_v2(cuda_entries[index].name, slot, cuda_entries[index].version,
                    CU_GET_PROC_ADDRESS_LEGACY_STREAM, &answer);
  else if (get_v1)
    result = get_v1(cuda_entries[index].name, slot, cuda_entries[index].version,
                    CU_GET_PROC_ADDRESS_LEGACY_STREAM);
  if (result != CUDA_SUCCESS)
    *slot = NULL;
}

static esper_status library_load(void)
{
  const char *name = esper_cuda_library();
  void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return cuda_refuse(ESPER_UNSUPPORTED,
                       "no CUDA driver: %s; install the NVIDIA driver, or make it visible here "
                       "(in a container: start it with its GPUs)",
                       dlerror());
  if (!dlsym(library, "cuGetProcAddress_v2") && !dlsym(library, "cuGetProcAddress"))
    return cuda_refuse(ESPER_UNSUPPORTED,
                       "%s has no cuGetProcAddress: it is older than CUDA 11.3; update the NVIDIA "
                       "driver",
                       name);
  const char *missing = NULL;
  for (int i = 0; i < CUDA_ENTRY_COUNT; i++) {
    entry_find(library, i);
    if (!*cuda_entry_slot(i) && cuda_entries[i].required && !missing)
      missing = cuda_entries[i].name;
  }
  if (missing)
    return cuda_refuse(ESPER_UNSUPPORTED,
                       "%s has no %s: it is too old, or only the toolkit's stub; update the NVIDIA "
                       "driver",
                       name, missing);
  return ESPER_OK;
}

static bool attribute_of(CUdevice device, CUdevice_attribute attribute)
{
  int value = 0;
  return libcuda.cuDeviceGetAttribute(&value, attribute, device) == CUDA_SUCCESS && value != 0;
}

static bool virtual_memory_found(void)
{
  return libcuda.cuMemGetAllocationGranularity && libcuda.cuMemAddressReserve &&
         libcuda.cuMemAddressFree && libcuda.cuMemCreate && libcuda.cuMemRelease &&
         libcuda.cuMemMap && libcuda.cuMemUnmap && libcuda.cuMemSetAccess;
}

static esper_status devices_find(void)
{
  int count = 0;
  esper_status status = CALL(cuInit, 0);
  if (status != ESPER_OK)
    return status;
  cuda_watch_forks();
  status = CALL(cuDriverGetVersion, &cuda_version);
  if (status == ESPER_OK)
    status = CALL(cuDeviceGetCount, &count);
  if (status != ESPER_OK)
    return status;
  if (count == 0)
    return cuda_refuse(ESPER_UNSUPPORTED,
                       "the CUDA driver finds no device; is CUDA_VISIBLE_DEVICES empty?");
  cuda_devices = calloc((size_t)count, sizeof *cuda_devices);
  if (!cuda_devices)
    return cuda_refuse(ESPER_HOST_MEMORY, "no host memory for a table of %d devices", count);
  for (int i = 0; i < count && status == ESPER_OK; i++) {
    cuda_device *device = &cuda_devices[i];
    status = CALL(cuDeviceGet, &device->handle, i);
    if (status != ESPER_OK)
      break;
    device->virtual_memory =
        virtual_memory_found() &&
        attribute_of(device->handle, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    bool said = libcuda.cuMemExportToShareableHandle && libcuda.cuMemImportFromShareableHandle &&
                attribute_of(device->handle,
                             CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    atomic_init(&device->sharing, said ? SHARING_IS_SAID : SHARING_IS_REFUSED);
    device->rdma =
        attribute_of(device->handle, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  }
  if (status == ESPER_OK)
    cuda_devices_seen = count;
  return status;
}

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static esper_status load_status;
static char load_error[CUDA_FAILURE_TEXT];

static void driver_load(void)
{
  load_status = library_load();
  if (load_status == ESPER_OK)
    load_status = devices_find();
  if (load_status == ESPER_OK)
    return;
  snprintf(load_error, sizeof load_error, "%s", cuda_last_error(NULL));
  /* No device, a stub, a driver that does not match its kernel module: each means that this process
   * cannot use CUDA. */
  if (load_status != ESPER_HOST_MEMORY)
    load_status = ESPER_UNSUPPORTED;
}

esper_status cuda_load(void)
{
  pthread_once(&load_once, driver_load);
  return load_status == ESPER_OK ? ESPER_OK : cuda_refuse(load_status, "%s", load_error);
}
