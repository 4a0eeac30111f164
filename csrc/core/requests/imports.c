#include "imports.h"

#include <stdlib.h>

#include "../base/call.h"
#include "../base/error.h"
#include "../memory/driver_pages.h"
#include "../memory/mapped.h"
#include "../memory/peers.h"
#include "../order/capturing.h"
#include "../order/device.h"
#include "drain.h"

/* ---- opening ----------------------------------------------------------- */

static esper_status check_names(const device_t *device, const esper_page_name *names, size_t count,
                                size_t *size)
{
  *size = 0;
  for (size_t i = 0; i < count; i++) {
    if (!names[i].size || names[i].size % device->granule || names[i].size > SIZE_MAX / 2 - *size)
      return error_set(ESPER_INVALID,
                       "a shared page has %llu bytes, but the size of a page on device %d is a "
                       "multiple of %zu: pass page names as esper_share() gave them",
                       (unsigned long long)names[i].size, device->index, device->granule);
    *size += names[i].size;
  }
  return count ? ESPER_OK
               : error_set(ESPER_INVALID,
                           "there are no page names: pass at least one, from esper_share()");
}

static esper_status import_one(device_t *device, import_t *import, const esper_page_name *name)
{
  uint64_t handle;
  esper_status status = call_page_import(device->core, device->index, name, &handle);
  if (status != ESPER_OK)
    return error_from_driver(device->core, status);
  import->pages[import->page_count++] =
      (struct imported_page){.handle = handle, .size = name->size};
  return ESPER_OK;
}

static esper_status map_one(device_t *device, import_t *import, size_t i)
{
  size_t size = import->pages[i].size;
  esper_status status =
      driver_page_map(device, import->address + import->mapped, size, import->pages[i].handle);
  if (status != ESPER_OK)
    return status;
  import->pages[i].mapped = true;
  import->mapped += size;
  return ESPER_OK;
}

static void link_import(device_t *device, import_t *import)
{
  lock(&device->lock);
  import->next = device->imports;
  device->imports = import;
  unlock(&device->lock);
}

/* Returns an unused import to the driver. */
static void discard(device_t *device, import_t *import)
{
  uintptr_t at = import->address;
  for (size_t i = 0; i < import->page_count; i++) {
    if (import->pages[i].mapped)
      driver_page_unmap(device, at, import->pages[i].size);
    driver_page_release(device, import->pages[i].handle);
    at += import->pages[i].size;
  }
  driver_range_free(device, import->address, import->size);
  free(import);
}

static esper_status map_all(device_t *device, import_t *import, const esper_page_name *names,
                            size_t count)
{
  esper_status status = ESPER_OK;
  for (size_t i = 0; i < count && status == ESPER_OK; i++)
    status = import_one(device, import, &names[i]); /* may wait for the other process */
  lock(&device->growth_lock);
  for (size_t i = 0; i < count && status == ESPER_OK; i++)
    status = map_one(device, import, i);
  if (status == ESPER_OK) {
    link_import(device, import);
  } else {
    discard(device, import);
  }
  unlock(&device->growth_lock);
  return status;
}

esper_status imports_open(device_t *device, const esper_page_name *names, size_t count,
                          void **address)
{
  core_t *core = device->core;
  *address = NULL;
  imports_reap(device);
  if (!mapped_granule(device))
    return error_set(
        ESPER_UNSUPPORTED,
        "device %d cannot map pages, and this memory consists of pages: share memory of "
        "classic segments with it",
        device->index);
  size_t size;
  esper_status status = check_names(device, names, count, &size);
  if (status != ESPER_OK)
    return status;
  import_t *import = malloc(sizeof *import + count * sizeof *import->pages);
  if (!import)
    return error_set(ESPER_HOST_MEMORY, "no host memory for %zu shared pages", count);
  *import = (import_t){.size = size};
  status = call_range_reserve(core, device->index, size, &import->address);
  if (status != ESPER_OK) {
    free(import);
    return error_from_driver(core, status);
  }
  *address = (void *)import->address;
  status = map_all(device, import, names, count);
  if (status != ESPER_OK)
    *address = NULL;
  return status;
}

/* ---- closing ----------------------------------------------------------- */

/* Waits for all that may use imports: this device and its peers. False: the host may not wait, or
 * the wait was in vain. It may not while a capture may be going on, because the captured stream may
 * be one that the core has never met. */
static bool wait_for_users(device_t *device)
{
  core_t *core = device->core;
  for (int d = 0; d < core->device_count; d++) {
    device_t *user;
    if (d != device->index && !peers_has(device, d))
      continue;
    if (core_device(core, d, &user) != ESPER_OK || capturing_is_possible_now(user) ||
        drain_device(user, DRAIN_LIMITED) != ESPER_OK)
      return false;
  }
  return true;
}

/* Takes the closed imports out of the list before the wait: the wait does not cover an import that
 * is closed while it goes on. */
static import_t *take_closed(device_t *device)
{
  import_t *taken = NULL, *import;
  lock(&device->growth_lock);
  lock(&device->lock);
  for (import_t **at = &device->imports; (import = *at);) {
    if (!import->closed) {
      at = &import->next;
      continue;
    }
    *at = import->next;
    import->next = taken;
    taken = import;
  }
  unlock(&device->lock);
  unlock(&device->growth_lock);
  return taken;
}

void imports_reap(device_t *device)
{
  import_t *import = take_closed(device), *next;
  if (!import)
    return;
  bool over = wait_for_users(device) || !RULE(UNMAP_NEEDS_COMPLETION);
  lock(&device->growth_lock);
  for (; import; import = next) {
    next = import->next;
    if (over)
      discard(device, import);
    else
      link_import(device, import);
  }
  unlock(&device->growth_lock);
}

static bool close_on(device_t *device, uintptr_t address)
{
  bool found = false;
  lock(&device->lock);
  for (import_t *i = device->imports; i && !found; i = i->next)
    if (i->address == address && !i->closed)
      found = i->closed = true;
  unlock(&device->lock);
  return found;
}

esper_status imports_close(core_t *core, void *address)
{
  for (int d = 0; d < core->device_count; d++)
    if (close_on(&core->devices[d], (uintptr_t)address)) {
      imports_reap(&core->devices[d]);
      return ESPER_OK;
    }
  return error_set(ESPER_INVALID,
                   "no opened shared memory begins at %p: pass an address from esper_open_shared()",
                   address);
}

void imports_destroy(device_t *device)
{
  for (import_t *i = device->imports, *next; i; i = next) {
    next = i->next;
    discard(device, i);
  }
  device->imports = NULL;
}
