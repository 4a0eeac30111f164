/* copies.c: pinned host memory, and copies between it and the device. */
#include "failure.h"
#include "functions.h"
#include "scope.h"

esper_status cuda_host_alloc(void *self, int device, size_t size, void **memory)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  void *pinned = NULL;
  status = CALL(cuMemHostAlloc, &pinned, size, 0);
  if (status == ESPER_OK)
    *memory = pinned;
  return cuda_scope_leave(&s, status);
}

esper_status cuda_host_free(void *self, int device, void *memory)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuMemFreeHost, memory));
}

esper_status cuda_copy_to_host(void *self, int device, void *stream, void *to, uintptr_t from,
                               size_t size)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, CALL(cuMemcpyDtoHAsync, to, from, size, stream));
}

esper_status cuda_copy_to_device(void *self, int device, void *stream, uintptr_t to,
                                 const void *from, size_t size)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, CALL(cuMemcpyHtoDAsync, to, from, size, stream));
}

esper_status cuda_memory_zero(void *self, int device, void *stream, uintptr_t address, size_t size)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, CALL(cuMemsetD8Async, address, 0, size, stream));
}
