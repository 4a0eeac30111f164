#include "shared.h"

#include <stdlib.h>

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/find.h"
#include "../blocks/free_blocks.h"
#include "page_table.h"
#include "peers.h"

/* ---- naming ------------------------------------------------------------ */

/* Sets it in the entries of all granules of the page. */
static void set_shared(segment_t *s, size_t first, shared_t *shared)
{
  size_t end = first + s->pages[first].granules;
  for (size_t i = first; i < end; i++)
    s->pages[i].shared = shared;
}

/* Without the device's lock: the pages of a live block stay, and no other thread names pages. */
static esper_status name_page(segment_t *s, page_t *page)
{
  device_t *device = s->device;
  if (page->shared)
    return ESPER_OK;
  if (page->asleep)
    return error_set(ESPER_ASLEEP, "the page at %p sleeps: wake it before it is shared",
                     (void *)page_address(s, page));
  shared_t *shared = malloc(sizeof *shared);
  if (!shared)
    return error_set(ESPER_HOST_MEMORY, "no host memory for the name of a page");
  *shared = (shared_t){.segment = s, .first = page->first};
  esper_status status = call_page_export(device->core, device->index, page->handle, &shared->name);
  if (status != ESPER_OK) {
    free(shared);
    return error_from_driver(device->core, status);
  }
  shared->name.size = page_size(s, page);
  lock(&device->lock);
  set_shared(s, page->first, shared);
  device->shared_count++;
  unlock(&device->lock);
  return ESPER_OK;
}

/* Names the pages from `begin` to `end`. If one is refused, those named before it keep their names
 * until they are forgotten. */
static esper_status name_pages(segment_t *s, uintptr_t begin, uintptr_t end, esper_page_name *names,
                               size_t *count)
{
  esper_status status = ESPER_OK;
  for (*count = 0; begin < end && status == ESPER_OK;) {
    page_t *page = page_at(s, begin);
    status = name_page(s, page);
    if (status == ESPER_OK)
      names[(*count)++] = page->shared->name;
    begin = page_address(s, page) + page_size(s, page);
  }
  return status;
}

/* The segment around a live block and the extent of the pages that the block lies on; NULL: none.
 * The pages stay while the growth lock is held. */
static segment_t *find_pages(core_t *core, const void *ptr, uintptr_t *begin, uintptr_t *end)
{
  const block_t *block = find_lock_live(core, ptr);
  segment_t *s = block && block->segment->pages ? block->segment : NULL;
  if (s) {
    const page_t *first = page_at(s, block->address);
    const page_t *last = page_at(s, block->address + block->size - 1);
    *begin = page_address(s, first);
    *end = page_address(s, last) + page_size(s, last);
  }
  if (block)
    unlock(&block->segment->device->lock);
  return s;
}

static esper_status name_all(segment_t *s, uintptr_t begin, uintptr_t end, esper_page_name **pages,
                             size_t *count)
{
  size_t most = (end - begin) / s->device->granule;
  esper_page_name *names = malloc(most * sizeof *names);
  if (!names)
    return error_set(ESPER_HOST_MEMORY, "no host memory for the names of %zu pages", most);
  esper_status status = name_pages(s, begin, end, names, count);
  if (status == ESPER_OK) {
    *pages = names;
  } else {
    free(names);
    *count = 0;
  }
  return status;
}

esper_status shared_name(core_t *core, const void *ptr, void **address, esper_page_name **pages,
                         size_t *count)
{
  uintptr_t begin, end;
  *pages = NULL;
  *count = 0;
  segment_t *s = find_pages(core, ptr, &begin, &end);
  device_t *device = s ? s->device : NULL;
  if (device) { /* again, since it may have been freed meanwhile */
    lock(&device->growth_lock);
    s = find_pages(core, ptr, &begin, &end);
  }
  esper_status status =
      s && s->device == device
          ? name_all(s, begin, end, pages, count)
          : error_set(ESPER_INVALID, "%p is in no live block of a mapped segment", ptr);
  if (device)
    unlock(&device->growth_lock);
  if (status == ESPER_OK)
    *address = (void *)begin;
  return status;
}

/* ---- forgetting -------------------------------------------------------- */

static bool is_live(const segment_t *s, const page_t *page, const block_t **at)
{
  uintptr_t begin = page_address(s, page), end = begin + page_size(s, page);
  while ((*at)->address + (*at)->size <= begin)
    *at = (*at)->next;
  for (const block_t *b = *at; b && b->address < end; b = b->next)
    if (block_state_of(b) == BLOCK_LIVE)
      return true;
  return false;
}

/* A list of the names that may be withdrawn. */
static shared_t *list_idle(device_t *device, bool always)
{
  shared_t *list = NULL;
  lock(&device->lock);
  if (device->shared_count)
    caches_close(device);
  for (segment_t *s = device->shared_count ? device->first_segment : NULL; s; s = s->next) {
    const block_t *at = s->first;
    for (size_t i = 0; s->pages && i < s->touched; i++) {
      page_t *page = &s->pages[i];
      if (!page->granules || page->first != i || !page->shared ||
          (!always && is_live(s, page, &at)))
        continue;
      page->shared->next = list;
      list = page->shared;
    }
  }
  unlock(&device->lock);
  return list;
}

/* The page stays until the end, because it still has its name. */
static bool forget(device_t *device, shared_t *shared)
{
  if (call_page_unexport(device->core, device->index, &shared->name) != ESPER_OK)
    return false;
  lock(&device->lock);
  set_shared(shared->segment, shared->first, NULL);
  device->shared_count--;
  unlock(&device->lock);
  free(shared);
  return true;
}

size_t shared_forget(device_t *device, bool always)
{
  size_t forgotten = 0;
  lock(&device->growth_lock);
  for (shared_t *shared = list_idle(device, always), *next; shared; shared = next) {
    next = shared->next;
    forgotten += forget(device, shared);
  }
  unlock(&device->growth_lock);
  return forgotten;
}
