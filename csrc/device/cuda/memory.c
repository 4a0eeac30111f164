/* memory.c: whole devices, and classic segments. */
#include "failure.h"
#include "functions.h"
#include "scope.h"

esper_status cuda_device_count(void *self, int *count)
{
  (void)self;
  *count = cuda_devices_seen;
  return ESPER_OK;
}

esper_status cuda_memory_info(void *self, int device, size_t *free, size_t *total)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuMemGetInfo, free, total));
}

esper_status cuda_memory_total(void *self, int device, size_t *total)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuDeviceTotalMem, total, cuda_devices[device].handle));
}

esper_status cuda_device_synchronize(void *self, int device)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  return cuda_scope_leave(&s, cuda_check("cuCtxSynchronize", libcuda.cuCtxSynchronize()));
}

esper_status cuda_memory_alloc(void *self, int device, size_t size, uintptr_t *address)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  CUdeviceptr pointer = 0;
  status = CALL(cuMemAlloc, &pointer, size);
  if (status == ESPER_OK)
    *address = (uintptr_t)pointer;
  return cuda_scope_leave(&s, status);
}

esper_status cuda_memory_free(void *self, int device, uintptr_t address)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuMemFree, address));
}
