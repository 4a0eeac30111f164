#include "orphan.h"

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/block.h"

loose_t *loose_take(device_t *device)
{
  loose_t *loose = arena_take(&device->loose_pages);
  if (loose)
    *loose = (loose_t){0};
  return loose;
}

static void link_loose(device_t *device, loose_t *loose)
{
  loose->next = device->loose;
  device->loose = loose;
}

void loose_settle(device_t *device, loose_t *loose)
{
  if (!loose->size) {
    arena_give(&device->loose_pages, loose);
    return;
  }
  link_loose(device, loose);
  device->loose_bytes += loose->size;
  device->reserving += loose->size;
}

void loose_release(device_t *device, uint64_t handle, size_t size, loose_t *loose)
{
  if (call_page_release(device->core, device->index, handle) == ESPER_OK)
    return;
  loose->handle = handle;
  loose->size = size;
}

static loose_t *unlink_first(device_t *device)
{
  lock(&device->lock);
  loose_t *loose = device->loose;
  if (loose)
    device->loose = loose->next;
  unlock(&device->lock);
  return loose;
}

size_t loose_give_back(device_t *device)
{
  size_t gone = 0;
  esper_status status = ESPER_OK;
  loose_t *loose;
  while (status == ESPER_OK && (loose = unlink_first(device))) {
    status = call_page_release(device->core, device->index, loose->handle);
    if (status != ESPER_OK)
      error_from_driver(device->core, status);
    lock(&device->lock);
    if (status == ESPER_OK) {
      gone += loose->size;
      device->loose_bytes -= loose->size;
      device->reserving -= loose->size;
      device->refused = 0;
      arena_give(&device->loose_pages, loose);
    } else {
      link_loose(device, loose);
    }
    unlock(&device->lock);
  }
  return gone;
}

bool loose_is_valid(const device_t *device)
{
  size_t bytes = 0; /* one may be in the hands of a thread */
  for (const loose_t *loose = device->loose; loose; loose = loose->next) {
    if (!loose->size)
      return false;
    bytes += loose->size;
  }
  return bytes <= device->loose_bytes && device->loose_bytes <= device->reserving &&
         arena_is_valid(&device->loose_pages);
}
