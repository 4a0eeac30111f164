#include "driver_pages.h"

#include "../base/call.h"
#include "../base/error.h"
#include "failure.h"

static esper_status told(const device_t *device, esper_status status)
{
  return status == ESPER_OK ? status : error_from_driver(device->core, status);
}

esper_status driver_page_create(const device_t *device, size_t size, uint64_t *page)
{
  if (device_has_failed(device))
    return failure_check(device);
  return told(device, call_page_create(device->core, device->index, size, page));
}

esper_status driver_page_map(const device_t *device, uintptr_t address, size_t size, uint64_t page)
{
  if (device_has_failed(device))
    return failure_check(device);
  return told(device, call_page_map(device->core, device->index, address, size, page, device->peers,
                                    device->peer_count));
}

esper_status driver_page_add(device_t *device, uintptr_t address, size_t size, uint64_t *page)
{
  esper_status status = driver_page_create(device, size, page);
  if (status != ESPER_OK)
    return status;
  status = driver_page_map(device, address, size, *page);
  if (status != ESPER_OK)
    driver_page_release(device, *page);
  return status;
}

void driver_page_unmap(device_t *device, uintptr_t address, size_t size)
{
  if (!device_has_failed(device))
    failure_note(device, call_page_unmap(device->core, device->index, address, size));
}

void driver_page_release(device_t *device, uint64_t page)
{
  if (!device_has_failed(device))
    failure_note(device, call_page_release(device->core, device->index, page));
}

void driver_range_free(device_t *device, uintptr_t address, size_t size)
{
  if (!device_has_failed(device))
    failure_note(device, call_range_free(device->core, device->index, address, size));
}
