#include "device.h"

#include "../base/call.h"
#include "../base/error.h"
#include "stream.h"

/* The share is of what the driver says this process can have, which may be less than all. */
esper_status device_set_limit(device_t *device, double fraction)
{
  size_t free, total = 0;
  esper_status status = ESPER_OK;
  if (fraction < 1)
    status = call_memory_info(device->core, device->index, &free, &total);
  if (status != ESPER_OK)
    return error_from_driver(device->core, status);
  lock(&device->lock);
  device->fraction = fraction;
  device->limit = fraction < 1 ? (size_t)(fraction * (double)total) : SIZE_MAX;
  unlock(&device->lock);
  return ESPER_OK;
}

/* Sets up what needs the driver, which merely making a core must not start. */
static esper_status device_start(core_t *core, device_t *device)
{
  uint64_t id;
  esper_status status = device_set_limit(device, device->fraction);
  if (status != ESPER_OK)
    return status;
  status = call_memory_total(core, device->index, &device->total);
  if (status == ESPER_OK)
    status = call_stream_id(core, device->index, NULL, &id);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  /* The driver's ids are small, so no stream has this one. */
  uint64_t all = UINT64_MAX - (uint64_t)device->index;
  if (!device->legacy)
    device->legacy = stream_create(core, device, id, NULL);
  if (!device->all_streams)
    device->all_streams = stream_create(core, device, all, NULL);
  if (!device->legacy || !device->all_streams)
    return error_set(ESPER_HOST_MEMORY, "no host memory for the streams of device %d",
                     device->index);
  device->legacy->immortal = true;
  device->all_streams->immortal = true;
  device->all_streams->all_streams = true;
  atomic_store(&device->ready, true);
  return ESPER_OK;
}

esper_status core_no_device(const core_t *core, int index)
{
  return error_set(ESPER_INVALID, "there is no device %d: this process has %d", index,
                   core->device_count);
}

esper_status core_device(core_t *core, int index, device_t **device)
{
  if (index < 0 || index >= core->device_count)
    return core_no_device(core, index);
  *device = &core->devices[index];
  if (atomic_load_explicit(&(*device)->ready, memory_order_acquire))
    return ESPER_OK;
  lock(&core->config_lock);
  esper_status status = atomic_load(&(*device)->ready) ? ESPER_OK : device_start(core, *device);
  unlock(&core->config_lock);
  return status;
}

esper_status core_used_device(core_t *core, int index, device_t **device)
{
  *device = NULL;
  if (index < 0 || index >= core->device_count)
    return core_no_device(core, index);
  if (atomic_load_explicit(&core->devices[index].ready, memory_order_acquire))
    *device = &core->devices[index];
  return ESPER_OK;
}
