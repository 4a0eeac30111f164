#include "wake.h"

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/free_blocks.h"
#include "../blocks/use.h"
#include "../memory/asleep.h"
#include "../memory/driver_pages.h"
#include "../memory/failure.h"
#include "../memory/mapped.h"
#include "../memory/peers.h"
#include "../memory/segment.h"
#include "../order/record.h"
#include "../order/retire.h"
#include "../pools/pool.h"
#include "../requests/drain.h"
#include "../requests/release.h"

/* Mapping a page takes as long as copying 3 MiB, whatever the page's size. So large pages wake
 * first, and the others are mapped while copies of large ones are still under way. */
static const size_t LARGE_PAGE = 8 * MIB;

typedef struct waking {
  device_t *device;
  const bool *tags;
  presented_t copier;
  void *spares;  /* blocks for the splits at the end, linked by their first word */
  size_t bytes;  /* of the pages that come back */
  bool enqueued; /* copies are under way */
  bool released; /* unused memory was given back already, to make room */
} waking_t;

static sleeper_t *chosen_from(const waking_t *w, sleeper_t *s)
{
  while (s && !(w->tags[s->tag] && s->page_count))
    s = s->next;
  return s;
}

/* The chosen sleepers that have pages. */
static sleeper_t *first_chosen(const waking_t *w)
{
  return chosen_from(w, w->device->sleepers);
}

static sleeper_t *next_chosen(const waking_t *w, const sleeper_t *s)
{
  return chosen_from(w, s->next);
}

/* ---- before ------------------------------------------------------------ */

/* Two splits may be needed to cut the page out of its block. */
static bool take_spares(waking_t *w)
{
  void **spare[2] = {arena_take(&w->device->blocks), arena_take(&w->device->blocks)};
  for (int i = 0; i < 2; i++)
    if (spare[i]) {
      *spare[i] = w->spares;
      w->spares = spare[i];
    }
  return spare[0] && spare[1];
}

static void give_spares(waking_t *w)
{
  while (w->spares) {
    void **spare = w->spares;
    w->spares = *spare;
    arena_give(&w->device->blocks, spare);
  }
}

/* Whether one freed block fills the page and owes nothing, so that it may become a hole. *last is a
 * block before the page, if it is one of the same segment. */
static bool is_unneeded(const segment_t *s, const page_t *page, const block_t **last)
{
  uintptr_t begin = page_address(s, page);
  const block_t *b = *last && (*last)->segment == s && (*last)->address <= begin ? *last : s->first;
  while (b->address + b->size <= begin)
    b = b->next;
  *last = b;
  return b->state == BLOCK_ASLEEP && b->address + b->size >= begin + page_size(s, page) &&
         page->absent && pool_may_give_back(s) && block_owes_nothing(b);
}

static esper_status prepare(waking_t *w)
{
  const block_t *last = NULL;
  w->bytes = 0;
  stream_retire_all(w->device->core); /* so that what is over is known to be */
  lock(&w->device->lock);
  for (sleeper_t *s = first_chosen(w); s; s = next_chosen(w, s))
    for (size_t i = 0; i < s->page_count; i++) {
      sleeping_page_t *page = &s->pages[i];
      const page_t *entry = sleeping_page_entry(page);
      page->unneeded = is_unneeded(page->segment, entry, &last) && take_spares(w);
      w->bytes += page->unneeded ? 0 : page_size(page->segment, entry);
    }
  esper_status status = segment_check_limits(w->device, w->bytes);
  if (status != ESPER_OK)
    give_spares(w);
  unlock(&w->device->lock);
  return status;
}

/* Gives back what nobody uses, once. */
static void release_unused(waking_t *w)
{
  w->released = true;
  drain_device(w->device, DRAIN_LIMITED);
  release_cached(w->device, NULL, true, SIZE_MAX);
}

/* ---- page by page ------------------------------------------------------ */

static esper_status map_page(const waking_t *w, const sleeping_page_t *page)
{
  device_t *device = w->device;
  const page_t *entry = sleeping_page_entry(page);
  size_t size = page_size(page->segment, entry);
  uint64_t handle;
  lock(&device->growth_lock); /* not while memory is copied: others may grow */
  lock(&device->lock);
  esper_status status = segment_check_limits(device, size);
  unlock(&device->lock);
  if (status == ESPER_OK)
    status = driver_page_add(device, page_address(page->segment, entry), size, &handle);
  if (status == ESPER_OK)
    sleeping_page_set(page, handle, false);
  unlock(&device->growth_lock);
  return status;
}

static esper_status copy_to_device(device_t *device, uintptr_t address, char *host, size_t size)
{
  return call_copy_to_device(device->core, device->index, device->copier->handle, address, host,
                             size);
}

static void fill_page(waking_t *w, const sleeper_t *s, const sleeping_page_t *page, size_t parcel)
{
  const page_t *entry = sleeping_page_entry(page);
  device_t *device = w->device;
  w->enqueued |= entry->empty || page->parcels;
  if (entry->empty)
    failure_note(device, call_memory_zero(device->core, device->index, w->copier.handle,
                                          page_address(page->segment, entry),
                                          page_size(page->segment, entry)));
  for (size_t i = parcel; i < parcel + page->parcels; i++)
    sleeper_copy(device, s, &s->parcels[i], copy_to_device);
}

static bool is_large(const sleeping_page_t *page)
{
  return page_size(page->segment, sleeping_page_entry(page)) >= LARGE_PAGE;
}

static esper_status bring_back(waking_t *w, const sleeper_t *s, bool large)
{
  esper_status status = ESPER_OK;
  for (size_t i = 0, parcel = 0; i < s->page_count && status == ESPER_OK; i++) {
    const sleeping_page_t *page = &s->pages[i];
    if (!page->unneeded && is_large(page) == large) {
      status = map_page(w, page);
      if (status == ESPER_OUT_OF_MEMORY && !w->released) {
        release_unused(w);
        status = map_page(w, page);
      }
      if (status == ESPER_OK)
        fill_page(w, s, page, parcel);
      if (status == ESPER_OK)
        status = failure_check(w->device);
    }
    parcel += page->parcels;
  }
  return status;
}

/* There was too little memory: what has come goes back. */
static void undo(const waking_t *w)
{
  lock(&w->device->growth_lock);
  for (sleeper_t *s = first_chosen(w); s; s = next_chosen(w, s))
    for (size_t i = 0; i < s->page_count; i++) {
      const page_t *entry = sleeping_page_entry(&s->pages[i]);
      if (entry->absent)
        continue;
      mapped_give_back(s->pages[i].segment, entry);
      sleeping_page_set(&s->pages[i], 0, true);
    }
  unlock(&w->device->growth_lock);
}

/* ---- afterwards -------------------------------------------------------- */

static void note_awake(waking_t *w)
{
  device_t *device = w->device;
  caches_close(device);
  for (int i = 0; i < TAGS; i++)
    if (w->tags[i] && device->asleep[i]) {
      device->asleep[i] = false;
      atomic_fetch_sub(&device->core->asleep, 1);
    }
  for (sleeper_t *s = first_chosen(w); s; s = next_chosen(w, s))
    for (size_t i = 0; i < s->page_count; i++)
      if (!s->pages[i].unneeded)
        sleeping_page_wakes(&s->pages[i]);
  for (segment_t *s = device->first_segment; s; s = s->next)
    if (s->pages && w->tags[s->heap->tag])
      asleep_free_blocks_wake(s, true);
}

static void finish(waking_t *w, esper_status status)
{
  lock(&w->device->growth_lock); /* not while another thread names pages */
  lock(&w->device->lock);
  give_spares(w);
  if (status == ESPER_OK)
    note_awake(w);
  unlock(&w->device->lock);
  unlock(&w->device->growth_lock);
  if (status != ESPER_OK)
    return;
  for (sleeper_t *s = first_chosen(w); s; s = next_chosen(w, s))
    sleeper_clear(s);
}

static esper_status wake(waking_t *w)
{
  esper_status status = sleeper_stream(w->device, &w->copier);
  if (status != ESPER_OK)
    return status;
  status = prepare(w);
  if (status == ESPER_OUT_OF_MEMORY || status == ESPER_REJECTED) { /* the memory fraction */
    release_unused(w);
    status = prepare(w);
  }
  if (status != ESPER_OK)
    return status;
  for (int large = 1; large >= 0; large--)
    for (sleeper_t *s = first_chosen(w); s; s = next_chosen(w, s))
      if (status == ESPER_OK)
        status = bring_back(w, s, large);
  if (w->enqueued)
    sleeper_wait_for_copies(w->device, stream_record(w->copier), RULE(WAKE_BEFORE_USE));
  if (status != ESPER_OK && !device_has_failed(w->device))
    undo(w);
  if (device_has_failed(w->device))
    status = failure_check(w->device);
  finish(w, status);
  return status;
}

esper_status wake_device(device_t *device, const bool tags[TAGS], size_t *woken)
{
  waking_t w = {.device = device, .tags = tags};
  bool any = false;
  lock(&device->sleep_lock);
  for (int i = 0; i < TAGS; i++)
    any |= tags[i] && device->asleep[i]; /* changes only under the sleep lock */
  esper_status status = failure_check(device);
  if (any && status == ESPER_OK)
    status = wake(&w);
  unlock(&device->sleep_lock);
  if (status == ESPER_OK)
    *woken += w.bytes;
  return status;
}
