/* scope.c: entering a device's context, and leaving it. */
#include "scope.h"

#include "failure.h"

esper_status cuda_scope_leave(cuda_scope *s, esper_status status)
{
  if (s->pushed)
    libcuda.cuCtxPopCurrent(&s->context);
  if (s->relaxed)
    libcuda.cuThreadExchangeStreamCaptureMode(&s->mode);
  return status;
}

esper_status cuda_scope_enter(cuda_scope *s, int device, scope_mode mode)
{
  *s = (cuda_scope){0};
  CUcontext current = NULL;
  esper_status status = cuda_device_find(device, &s->device);
  if (status == ESPER_OK)
    status = cuda_device_retain(s->device, &s->context);
  if (status == ESPER_OK)
    status = CALL(cuCtxGetCurrent, &current);
  if (status == ESPER_OK && mode == SCOPE_RELAXED) {
    s->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    status = CALL(cuThreadExchangeStreamCaptureMode, &s->mode);
    s->relaxed = status == ESPER_OK;
  }
  if (status == ESPER_OK && current != s->context) {
    status = CALL(cuCtxPushCurrent, s->context);
    s->pushed = status == ESPER_OK;
  }
  return status == ESPER_OK ? ESPER_OK : cuda_scope_leave(s, status);
}

esper_status cuda_scope_enter_virtual(cuda_scope *s, int device)
{
  esper_status status = cuda_scope_enter(s, device, SCOPE_RELAXED);
  if (status != ESPER_OK || s->device->virtual_memory)
    return status;
  return cuda_scope_leave(s,
                          cuda_refuse(ESPER_UNSUPPORTED,
                                      "CUDA device %d has no virtual memory management", device));
}
