#include "failure.h"

#include <stdio.h>

#include "../base/error.h"
#include "../blocks/free_blocks.h"

void failure_note(device_t *device, esper_status status)
{
  if (status == ESPER_OK)
    return;
  error_from_driver(device->core, status);
  lock(&device->lock);
  if (!device_has_failed(device)) {
    snprintf(device->failure, sizeof device->failure,
             "device %d has failed: the driver refused a step that cannot be undone (%s). Nothing "
             "is allocated on it any more: end the process, and look for the first error of a "
             "kernel",
             device->index, esper_last_error());
    atomic_store(&device->failed, true);
    caches_close(device);
  }
  unlock(&device->lock);
  failure_check(device);
}

esper_status failure_check(const device_t *device)
{
  if (!device_has_failed(device))
    return ESPER_OK;
  return error_set(ESPER_DEVICE_ERROR, "%s", device->failure);
}
