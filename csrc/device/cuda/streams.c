/* streams.c: streams and events. */
#include <sched.h>
#include <time.h>

#include "failure.h"
#include "functions.h"
#include "scope.h"

/* ---- streams --------------------------------------------------------------- */

static esper_status id_of(CUstream stream, uint64_t *id)
{
  unsigned long long value = 0;
  esper_status status = CALL(cuStreamGetId, stream, &value);
  if (status == ESPER_OK)
    *id = value;
  return status;
}

esper_status cuda_stream_id(void *self, int device, void *stream, uint64_t *id)
{
  (void)self;
  if (!libcuda.cuStreamGetId)
    return cuda_refuse(ESPER_UNSUPPORTED,
                       "cuStreamGetId is missing: it came with CUDA 12.0, this driver is %d.%d",
                       cuda_version / 1000, cuda_version % 1000 / 10);
  RETURN_ON_STREAM(device, stream, id_of(stream, id));
}

static esper_status capture_of(CUstream stream, uint64_t *capture)
{
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  esper_status status = CALL(cuStreamIsCapturing, stream, &state);
  if (status == ESPER_OK && state != CU_STREAM_CAPTURE_STATUS_NONE)
    status = CALL(cuStreamGetCaptureInfo, stream, &state, &id, NULL, NULL, NULL);
  if (status != ESPER_OK)
    return status;
  /* An invalidated capture has no id any more, but the stream is still in it. */
  if (state == CU_STREAM_CAPTURE_STATUS_NONE)
    *capture = 0;
  else
    *capture = state == CU_STREAM_CAPTURE_STATUS_ACTIVE && id ? id : ESPER_CAPTURE_INVALID;
  return ESPER_OK;
}

esper_status cuda_stream_capture(void *self, int device, void *stream, uint64_t *capture)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, capture_of(stream, capture));
}

esper_status cuda_stream_create(void *self, int device, void **stream)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  CUstream created = NULL;
  status = CALL(cuStreamCreate, &created, CU_STREAM_NON_BLOCKING);
  if (status == ESPER_OK)
    *stream = created;
  return cuda_scope_leave(&s, status);
}

esper_status cuda_stream_destroy(void *self, int device, void *stream)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuStreamDestroy, stream));
}

esper_status cuda_stream_wait(void *self, int device, void *stream, void *event)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, CALL(cuStreamWaitEvent, stream, event, 0));
}

/* ---- events ---------------------------------------------------------------- */

esper_status cuda_event_create(void *self, int device, void **event)
{
  (void)self;
  cuda_scope s;
  esper_status status = cuda_scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  CUevent created = NULL;
  status = CALL(cuEventCreate, &created, CU_EVENT_DISABLE_TIMING);
  if (status == ESPER_OK)
    *event = created;
  return cuda_scope_leave(&s, status);
}

esper_status cuda_event_destroy(void *self, int device, void *event)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuEventDestroy, event));
}

esper_status cuda_event_record(void *self, int device, void *event, void *stream)
{
  (void)self;
  RETURN_ON_STREAM(device, stream, CALL(cuEventRecord, event, stream));
}

esper_status cuda_event_record_all(void *self, int device, void *event)
{
  (void)self;
  if (!libcuda.cuCtxRecordEvent)
    return cuda_refuse(ESPER_UNSUPPORTED,
                       "cuCtxRecordEvent is missing: it came with CUDA 12.5, this driver is %d.%d",
                       cuda_version / 1000, cuda_version % 1000 / 10);
  cuda_scope s;
  esper_status status = cuda_scope_enter(&s, device, SCOPE_RELAXED);
  if (status != ESPER_OK)
    return status;
  CUcontext context = atomic_load_explicit(&s.device->context, memory_order_relaxed);
  return cuda_scope_leave(&s, CALL(cuCtxRecordEvent, context, event));
}

esper_status cuda_event_query(void *self, int device, void *event)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuEventQuery, event));
}

esper_status cuda_event_synchronize(void *self, int device, void *event)
{
  (void)self;
  RETURN_SCOPED(device, SCOPE_RELAXED, CALL(cuEventSynchronize, event));
}

static uint64_t nanoseconds(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The driver has no wait with a limit, so this asks again and again: at first without a pause,
 * because most events complete soon, then at intervals, which leave the processor to others. */
esper_status cuda_event_wait(void *self, int device, void *event, unsigned microseconds)
{
  static const uint64_t EAGER = 50000;
  const uint64_t begin = nanoseconds(), limit = (uint64_t)microseconds * 1000;
  esper_status status;
  while ((status = cuda_event_query(self, device, event)) == ESPER_NOT_READY) {
    uint64_t waited = nanoseconds() - begin;
    if (waited >= limit)
      break;
    if (waited < EAGER)
      sched_yield();
    else
      nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
  }
  return status;
}
