#include "orphan.h"

#include "../base/call.h"
#include "../base/error.h"

orphan_t *orphan_reserve(device_t *device)
{
  orphan_t *orphan = arena_take(&device->orphan_arena);
  if (orphan)
    *orphan = (orphan_t){0};
  return orphan;
}

static void link_orphan(device_t *device, orphan_t *orphan)
{
  orphan->next = device->orphans;
  device->orphans = orphan;
}

void orphan_keep(device_t *device, orphan_t *orphan)
{
  if (!orphan->size) {
    arena_give(&device->orphan_arena, orphan);
    return;
  }
  link_orphan(device, orphan);
  device->orphaned_bytes += orphan->size;
  device->reserving += orphan->size;
}

void orphan_release_page(device_t *device, uint64_t handle, size_t size, orphan_t *orphan)
{
  if (call_page_release(device->core, device->index, handle) == ESPER_OK)
    return;
  orphan->handle = handle;
  orphan->size = size;
}

static orphan_t *unlink_first(device_t *device)
{
  lock(&device->lock);
  orphan_t *orphan = device->orphans;
  if (orphan)
    device->orphans = orphan->next;
  unlock(&device->lock);
  return orphan;
}

size_t orphans_give_back(device_t *device)
{
  size_t gone = 0;
  esper_status status = ESPER_OK;
  orphan_t *orphan;
  while (status == ESPER_OK && (orphan = unlink_first(device))) {
    status = call_page_release(device->core, device->index, orphan->handle);
    if (status != ESPER_OK)
      error_from_driver(device->core, status);
    lock(&device->lock);
    if (status == ESPER_OK) {
      gone += orphan->size;
      device->orphaned_bytes -= orphan->size;
      device->reserving -= orphan->size;
      device->refused = 0;
      arena_give(&device->orphan_arena, orphan);
    } else {
      link_orphan(device, orphan);
    }
    unlock(&device->lock);
  }
  return gone;
}

bool orphans_are_valid(const device_t *device)
{
  size_t bytes = 0; /* a thread may hold one at the moment */
  for (const orphan_t *orphan = device->orphans; orphan; orphan = orphan->next) {
    if (!orphan->size)
      return false;
    bytes += orphan->size;
  }
  return bytes <= device->orphaned_bytes && device->orphaned_bytes <= device->reserving &&
         arena_is_valid(&device->orphan_arena);
}
