/* devices.c: the devices of this process, and their primary contexts. */
#include "devices.h"

#include <pthread.h>

#include "cuda.h"
#include "failure.h"

cuda_device *cuda_devices;
int cuda_devices_seen;
int cuda_version;

static pthread_mutex_t retain_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool forked;

esper_status cuda_device_retain(cuda_device *device, CUcontext *context)
{
  *context = atomic_load_explicit(&device->context, memory_order_acquire);
  if (*context)
    return ESPER_OK;
  pthread_mutex_lock(&retain_lock);
  esper_status status = ESPER_OK;
  *context = atomic_load_explicit(&device->context, memory_order_relaxed);
  if (!*context) {
    /* Creating a context allocates memory. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    status = CALL(cuThreadExchangeStreamCaptureMode, &mode);
    if (status == ESPER_OK) {
      status = CALL(cuDevicePrimaryCtxRetain, context, device->handle);
      libcuda.cuThreadExchangeStreamCaptureMode(&mode);
    }
    if (status == ESPER_OK)
      atomic_store_explicit(&device->context, *context, memory_order_release);
  }
  pthread_mutex_unlock(&retain_lock);
  return status;
}

static void mark_forked(void)
{
  atomic_store(&forked, true);
}

void cuda_watch_forks(void)
{
  pthread_atfork(NULL, NULL, mark_forked);
}

esper_status cuda_refuse_if_forked(void)
{
  if (!atomic_load_explicit(&forked, memory_order_relaxed))
    return ESPER_OK;
  return cuda_refuse(ESPER_DEVICE_ERROR,
                     "this process was forked after CUDA was initialised in its parent, and CUDA "
                     "does not work in such a child; start workers with the 'spawn' or "
                     "'forkserver' method of multiprocessing");
}

int esper_cuda_is_forked(void)
{
  return atomic_load_explicit(&forked, memory_order_relaxed);
}

esper_status cuda_device_find(int device, cuda_device **found)
{
  if (device < 0 || device >= cuda_devices_seen)
    return cuda_refuse(ESPER_INVALID, "there is no CUDA device %d; this process sees %d", device,
                       cuda_devices_seen);
  *found = &cuda_devices[device];
  return cuda_refuse_if_forked();
}
