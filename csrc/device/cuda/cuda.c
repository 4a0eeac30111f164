/* cuda.c: the CUDA driver behind device.h, and reports about it.
 *
 * libcuda is opened at run time, so a machine without a GPU can load this library, and the
 * toolkit's stub is never linked by mistake. Each call of device.h is made in a scope (scope.h). */
#include "cuda.h"

#include "devices.h"
#include "entry_points.h"
#include "failure.h"
#include "functions.h"
#include "load.h"

static const esper_driver driver = {
    .name = "cuda",
    .device_count = cuda_device_count,
    .memory_info = cuda_memory_info,
    .memory_total = cuda_memory_total,
    .device_synchronize = cuda_device_synchronize,
    .memory_alloc = cuda_memory_alloc,
    .memory_free = cuda_memory_free,
    .page_granularity = cuda_page_granularity,
    .range_reserve = cuda_range_reserve,
    .range_free = cuda_range_free,
    .page_create = cuda_page_create,
    .page_release = cuda_page_release,
    .page_map = cuda_page_map,
    .page_unmap = cuda_page_unmap,
    .page_access = cuda_page_access,
    .peer_check = cuda_peer_check,
    .page_export = cuda_page_export,
    .page_unexport = cuda_page_unexport,
    .page_import = cuda_page_import,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .copy_to_host = cuda_copy_to_host,
    .copy_to_device = cuda_copy_to_device,
    .memory_zero = cuda_memory_zero,
    .stream_id = cuda_stream_id,
    .stream_capture = cuda_stream_capture,
    .capture_tails = cuda_capture_tails,
    .capture_before = cuda_capture_before,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_wait = cuda_stream_wait,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_record_all = cuda_event_record_all,
    .event_query = cuda_event_query,
    .event_synchronize = cuda_event_synchronize,
    .event_wait = cuda_event_wait,
    .last_error = cuda_last_error,
};

esper_status esper_cuda_open(const esper_driver **result)
{
  esper_status status = cuda_load();
  if (status != ESPER_OK)
    return status;
  if (cuda_refuse_if_forked() != ESPER_OK)
    return ESPER_UNSUPPORTED;
  *result = &driver;
  return ESPER_OK;
}

/* ---- reports --------------------------------------------------------------- */

const char *esper_cuda_last_error(void)
{
  return cuda_last_error(NULL);
}

int esper_cuda_driver_version(void)
{
  cuda_load();
  return cuda_version;
}

int esper_cuda_get_entry_point(int index, esper_cuda_entry_point *entry)
{
  if (index < 0 || index >= CUDA_ENTRY_COUNT)
    return 0;
  cuda_load();
  *entry = (esper_cuda_entry_point){.name = cuda_entries[index].name,
                                    .version = cuda_entries[index].version,
                                    .required = cuda_entries[index].required,
                                    .found = *cuda_entry_slot(index) != NULL};
  return 1;
}

esper_status esper_cuda_get_device(int index, esper_cuda_device *info)
{
  cuda_device *device = NULL;
  *info = (esper_cuda_device){0};
  esper_status status = cuda_device_find(index, &device);
  if (status == ESPER_OK)
    status = CALL(cuDeviceGetName, info->name, sizeof info->name, device->handle);
  if (status == ESPER_OK)
    status = CALL(cuDeviceTotalMem, &info->total_bytes, device->handle);
  if (status == ESPER_OK)
    status = CALL(cuDeviceGetAttribute, &info->compute_capability[0],
                  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device->handle);
  if (status == ESPER_OK)
    status = CALL(cuDeviceGetAttribute, &info->compute_capability[1],
                  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device->handle);
  info->virtual_memory = status == ESPER_OK && device->virtual_memory;
  return status;
}

static esper_status current_device(CUdevice *handle)
{
  return CALL(cuCtxGetDevice, handle);
}

/* If the thread has no context, borrows any that exists already. */
static esper_status stream_context(CUstream stream, CUcontext *context)
{
  esper_status status = CALL(cuStreamGetCtx, stream, context);
  for (int i = 0; i < cuda_devices_seen && cuda_lacks_context(status); i++) {
    CUcontext any = atomic_load_explicit(&cuda_devices[i].context, memory_order_acquire);
    if (!any || libcuda.cuCtxPushCurrent(any) != CUDA_SUCCESS)
      continue;
    status = CALL(cuStreamGetCtx, stream, context);
    libcuda.cuCtxPopCurrent(&any);
  }
  return status;
}

static esper_status stream_device(CUstream stream, CUdevice *handle)
{
  if ((uintptr_t)stream <= 2)
    return current_device(handle);
  CUcontext context = NULL;
  esper_status status = stream_context(stream, &context);
  if (status == ESPER_OK)
    status = CALL(cuCtxPushCurrent, context);
  if (status != ESPER_OK)
    return status;
  status = current_device(handle);
  libcuda.cuCtxPopCurrent(&context);
  return status;
}

esper_status esper_cuda_stream_device(void *stream, int *device)
{
  const esper_driver *loaded;
  CUdevice handle;
  esper_status status = esper_cuda_open(&loaded);
  if (status != ESPER_OK)
    return status;
  status = stream_device(stream, &handle);
  if (status != ESPER_OK)
    return status;
  for (int i = 0; i < cuda_devices_seen; i++)
    if (cuda_devices[i].handle == handle) {
      *device = i;
      return ESPER_OK;
    }
  return cuda_refuse(ESPER_INVALID, "the stream belongs to a device that this process cannot use");
}
