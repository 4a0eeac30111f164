#include "waking.h"

#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/use.h"
#include "../order/retire.h"
#include "../pools/pool.h"
#include "driver_pages.h"
#include "segment.h"

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

esper_status waking_begin(waking_t *w)
{
  const block_t *last = NULL;
  w->bytes = 0;
  stream_retire_all(w->device->core); /* so that what is over is known to be */
  lock(&w->device->lock);
  for (sleeping_t *list = waking_first(w); list; list = waking_next(w, list))
    for (size_t i = 0; i < list->page_count; i++) {
      sleeping_page_t *page = &list->pages[i];
      page->unneeded =
          is_unneeded(page->segment, sleeping_page_entry(page), &last) && take_spares(w);
      w->bytes += page->unneeded ? 0 : sleeping_page_size(page);
    }
  esper_status status = segment_check_limits(w->device, w->bytes);
  if (status != ESPER_OK)
    give_spares(w);
  unlock(&w->device->lock);
  return status;
}

/* ---- page by page ------------------------------------------------------ */

esper_status waking_map(const waking_t *w, const sleeping_page_t *page)
{
  device_t *device = w->device;
  size_t size = sleeping_page_size(page);
  uint64_t handle;
  lock(&device->growth_lock); /* not while memory is copied: others may grow */
  lock(&device->lock);
  esper_status status = segment_check_limits(device, size);
  unlock(&device->lock);
  if (status == ESPER_OK)
    status = driver_page_add(device, page_address(page->segment, sleeping_page_entry(page)), size,
                             &handle);
  if (status == ESPER_OK)
    sleeping_page_set(page, handle, false);
  unlock(&device->growth_lock);
  return status;
}

void waking_undo(const waking_t *w)
{
  for (sleeping_t *list = waking_first(w); list; list = waking_next(w, list))
    for (size_t i = 0; i < list->page_count; i++)
      if (!sleeping_page_entry(&list->pages[i])->absent)
        asleep_unmap(w->device, &list->pages[i], 1);
}

/* ---- afterwards -------------------------------------------------------- */

static void note_awake(const waking_t *w)
{
  device_t *device = w->device;
  caches_close(device);
  for (int i = 0; i < TAGS; i++)
    if (w->tags[i] && device->asleep[i]) {
      device->asleep[i] = false;
      atomic_fetch_sub(&device->core->asleep, 1);
    }
  for (sleeping_t *list = waking_first(w); list; list = waking_next(w, list))
    for (size_t i = 0; i < list->page_count; i++)
      if (!list->pages[i].unneeded)
        sleeping_page_wakes(&list->pages[i]);
  for (segment_t *s = device->first_segment; s; s = s->next)
    if (s->pages && w->tags[s->heap->tag])
      asleep_free_blocks_wake(s, true);
}

void waking_end(waking_t *w, bool done)
{
  lock(&w->device->growth_lock); /* not while another thread hands pages to a process */
  lock(&w->device->lock);
  give_spares(w);
  if (done)
    note_awake(w);
  unlock(&w->device->lock);
  unlock(&w->device->growth_lock);
  for (sleeping_t *list = waking_first(w); done && list; list = waking_next(w, list))
    sleeping_clear(list);
}
