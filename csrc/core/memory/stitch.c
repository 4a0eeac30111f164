#include "stitch.h"

#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/use.h"
#include "../order/retire.h"
#include "../pools/pool.h"
#include "driver_pages.h"
#include "mapped.h"
#include "page_table.h"

static bool pages_may_move(const heap_t *heap)
{
  return !heap->capture && !heap->quiesced;
}

static bool is_movable(const block_t *block)
{
  const segment_t *s = block->segment;
  return s->pages && !s->pinned && pool_may_give_back(s);
}

/* ---- what has completed ------------------------------------------------ */

/* The latest stamp among the heap's stale blocks and free blocks of at least a granule whose owner
 * order is not known to have completed. 0: none. */
static uint64_t owed_stamp(heap_t *heap)
{
  size_t granule = heap->device->granule;
  uint64_t stamp = 0;
  free_blocks_promote(heap);
  for (int large = 0; large < 2; large++) {
    const bins_t *bins = &heap->ready[large];
    for (const block_t *b = bins_best_fit(bins, granule); b; b = bins_next(bins, b))
      if (is_movable(b) && b->stamp > stamp && !owner_order_has_completed(b))
        stamp = b->stamp;
  }
  for (const block_t *b = heap->device->stale; b; b = b->newer)
    if (b->segment->heap == heap && b->stamp > stamp && !owner_order_has_completed(b))
      stamp = b->stamp;
  return stamp;
}

void stitch_learn(heap_t *heap)
{
  probes_t probes;
  probes.count = 0;
  device_t *device = heap->device;
  if (heap->pool != device->default_pool || heap->capture)
    return;
  lock(&device->lock);
  for (heap_t *h = heap->pool->heaps; h; h = h->next) {
    uint64_t stamp = pages_may_move(h) ? owed_stamp(h) : 0;
    if (stamp)
      probes_add(&probes, owner_order_stream(h), stamp);
  }
  unlock(&device->lock);
  probes_ask(&probes, device->core, false);
}

/* ---- moving ------------------------------------------------------------ */

/* The list that the block belongs to; NULL: its pages may not move. */
static movable_t *list_for(stitch_t *stitch, const heap_t *heap, const block_t *block)
{
  if (!is_movable(block) || !uses_have_completed(block))
    return NULL;
  if (owner_order_has_completed(block) || !RULE(MOVED_PAGES_NEED_COMPLETION))
    return &stitch->completed;
  return block->segment->heap == heap ? &stitch->ordered : NULL;
}

static void add_movable(movable_t *list, block_t *block)
{
  block->newer = NULL;
  *list->end = block;
  list->end = &block->newer;
  list->bytes += block->size;
}

/* Claims whole pages of the free blocks of one size class of `from`. */
static void claim_from(stitch_t *stitch, const heap_t *heap, heap_t *from, bool large,
                       size_t enough, size_t most)
{
  const bins_t *bins = &from->ready[large];
  block_t *next;
  for (block_t *b = bins_best_fit(bins, heap->device->granule); b && stitch_bytes(stitch) < enough;
       b = next) {
    uintptr_t first;
    next = bins_next(bins, b);
    movable_t *list = list_for(stitch, heap, b);
    size_t got = stitch_bytes(stitch);
    size_t size = list ? pages_within(b, enough - got, most - got, &first) : 0;
    b = size ? mapped_carve(b, first, size) : NULL;
    if (b)
      add_movable(list, b);
    if (b && list == &stitch->ordered && b->stamp > stitch->stamp)
      stitch->stamp = b->stamp;
  }
}

void stitch_claim(stitch_t *stitch, heap_t *heap, size_t enough, size_t most)
{
  *stitch = (stitch_t){0};
  stitch->completed.end = &stitch->completed.first;
  stitch->ordered.end = &stitch->ordered.first;
  if (!enough || heap->pool != heap->device->default_pool || heap->capture)
    return;
  caches_close_pool(heap->device, heap->pool);
  for (heap_t *from = heap->pool->heaps; from; from = from->next)
    for (int large = 1; large >= 0 && pages_may_move(from); large--)
      claim_from(stitch, heap, from, large, enough, most);
}

static size_t map_moved(const movable_t *list, block_t *into, size_t at, size_t *moved,
                        esper_status *status)
{
  segment_t *s = into->segment;
  for (const block_t *b = list->first; b; b = b->newer)
    for (size_t done = 0; done < b->size; ++*moved) {
      const page_t *page = page_at(b->segment, b->address + done);
      size_t size = page_size(b->segment, page);
      *status = driver_page_map(s->device, into->address + at, size, page->handle);
      if (*status != ESPER_OK)
        return at;
      page_add(s, into->address + at, size, page->handle);
      at += size;
      done += size;
    }
  return at;
}

esper_status stitch_move(const stitch_t *stitch, block_t *into, size_t *moved)
{
  segment_t *s = into->segment;
  esper_status status = ESPER_OK;
  *moved = 0;
  size_t mapped = map_moved(&stitch->completed, into, 0, moved, &status);
  if (status == ESPER_OK)
    mapped = map_moved(&stitch->ordered, into, mapped, moved, &status);
  for (const block_t *b = stitch->completed.first; b && status == ESPER_OK; b = b->newer)
    driver_page_unmap(s->device, b->address, b->size);
  for (; status != ESPER_OK && mapped; --*moved) {
    page_t *page = page_at(s, into->address + mapped - 1);
    mapped -= page_size(s, page);
    driver_page_unmap(s->device, page_address(s, page), page_size(s, page));
    page_remove(s, page);
  }
  return status;
}

static void finish(const movable_t *list, bool moved, bool stale)
{
  for (block_t *b = list->first, *next; b; b = next) {
    next = b->newer;
    b->newer = NULL;
    if (moved)
      mapped_left(b, stale);
    else
      free_blocks_add(b);
  }
}

void stitch_finish(const stitch_t *stitch, bool moved)
{
  finish(&stitch->completed, moved, false);
  finish(&stitch->ordered, moved, true);
}
