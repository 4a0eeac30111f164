/* wake.c: waking the memory of tags.
 *
 * Page by page, the large ones first, physical memory is created and mapped where the page was, and
 * its bytes are copied back while the next page is being mapped. The host waits for the last copy,
 * so that every stream may use the memory afterwards: also those that the core has never met, and
 * graphs. If there is too little memory, what was mapped is given back, and everything still
 * sleeps: the host keeps its copies until all has woken. A page that one freed block fills stays
 * away, unless the block still owes something or its pool keeps its memory. */
#include "../core/base/call.h"
#include "../core/memory/failure.h"
#include "../core/memory/waking.h"
#include "../core/order/record.h"
#include "../core/requests/drain.h"
#include "../core/requests/release.h"
#include "../esper_sleep.h"
#include "sleeper.h"

/* Mapping a page of at most 32 MiB takes as long as copying 3 MiB, whatever its size. So large
 * pages wake first, and the others are mapped while copies of large ones are still under way. */
static const size_t WAKES_FIRST = 8 * MIB;

typedef struct wake_up {
  waking_t waking;
  presented_t copier;
  bool enqueued; /* copies are under way */
  bool released; /* unused memory was given back already, to make room */
} wake_up_t;

/* Gives back what nobody uses, once. */
static void release_unused(wake_up_t *c)
{
  c->released = true;
  drain_device(c->waking.device, DRAIN_LIMITED);
  release_cached(c->waking.device, NULL, true, SIZE_MAX);
}

static esper_status copy_to_device(device_t *device, uintptr_t address, char *host, size_t size)
{
  return call_copy_to_device(device->core, device->index, device->copier->handle, address, host,
                             size);
}

static void fill_page(wake_up_t *c, const sleeper_t *s, const sleeping_page_t *page, size_t parcel)
{
  const page_t *entry = sleeping_page_entry(page);
  device_t *device = c->waking.device;
  c->enqueued |= entry->empty || page->parcels;
  if (entry->empty)
    failure_note(device,
                 call_memory_zero(device->core, device->index, c->copier.handle,
                                  page_address(page->segment, entry), sleeping_page_size(page)));
  for (size_t i = parcel; i < parcel + page->parcels; i++)
    sleeper_copy(device, s, &s->list.parcels[i], copy_to_device);
}

static esper_status bring_page(wake_up_t *c, const sleeper_t *s, const sleeping_page_t *page,
                               size_t parcel)
{
  esper_status status = waking_map(&c->waking, page);
  if (status == ESPER_OUT_OF_MEMORY && !c->released) {
    release_unused(c);
    status = waking_map(&c->waking, page);
  }
  if (status != ESPER_OK)
    return status;
  fill_page(c, s, page, parcel);
  return failure_check(c->waking.device);
}

static esper_status bring_back(wake_up_t *c, bool large)
{
  esper_status status = ESPER_OK;
  const waking_t *w = &c->waking;
  for (sleeping_t *list = waking_first(w); list; list = waking_next(w, list))
    for (size_t i = 0, parcel = 0; i < list->page_count && status == ESPER_OK; i++) {
      const sleeping_page_t *page = &list->pages[i];
      if (!page->unneeded && (sleeping_page_size(page) >= WAKES_FIRST) == large)
        status = bring_page(c, sleeper_with(list), page, parcel);
      parcel += page->parcels;
    }
  return status;
}

static esper_status begin(wake_up_t *c)
{
  esper_status status = sleeper_stream(c->waking.device, &c->copier);
  if (status != ESPER_OK)
    return status;
  status = waking_begin(&c->waking);
  if (status != ESPER_OUT_OF_MEMORY && status != ESPER_REJECTED)
    return status;
  release_unused(c); /* it may be within the memory fraction afterwards */
  return waking_begin(&c->waking);
}

static esper_status wake(wake_up_t *c)
{
  device_t *device = c->waking.device;
  esper_status status = begin(c);
  if (status != ESPER_OK)
    return status;
  status = bring_back(c, true);
  if (status == ESPER_OK)
    status = bring_back(c, false);
  if (c->enqueued)
    sleeper_wait_for_copies(device, sleeper_record(c->copier), RULE(WAKE_BEFORE_USE));
  if (status != ESPER_OK && !device_has_failed(device))
    waking_undo(&c->waking);
  if (device_has_failed(device))
    status = failure_check(device);
  waking_end(&c->waking, status == ESPER_OK);
  return status;
}

/* *woken grows by the bytes of memory that came back. */
static esper_status wake_device(device_t *device, const bool tags[TAGS], size_t *woken)
{
  wake_up_t c = {.waking = {.device = device, .tags = tags}};
  bool any = false;
  lock(&device->sleep_lock);
  for (int i = 0; i < TAGS; i++)
    any |= tags[i] && device->asleep[i]; /* changes only under the sleep lock */
  esper_status status = failure_check(device);
  if (any && status == ESPER_OK)
    status = wake(&c);
  unlock(&device->sleep_lock);
  if (status == ESPER_OK)
    *woken += c.waking.bytes;
  return status;
}

esper_status esper_wake(esper_core *core, int index, const char *const *tags, size_t count,
                        size_t *woken)
{
  bool chosen[TAGS];
  device_t *only = NULL;
  size_t bytes = 0;
  esper_status status = sleeper_tags(tags, count, chosen);
  if (status == ESPER_OK && index != -1)
    status = core_used_device(core, index, &only);
  for (int i = 0; i < core->device_count && status == ESPER_OK; i++) {
    device_t *device = &core->devices[i];
    if (index == -1 ? atomic_load(&device->ready) : device == only)
      status = wake_device(device, chosen, &bytes);
  }
  if (status == ESPER_OK && woken)
    *woken = bytes;
  return status;
}
