#include "stitch.h"

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/use.h"
#include "../order/retire.h"
#include "../pools/pool.h"
#include "mapped.h"
#include "orphan.h"
#include "page_table.h"
#include "peers.h"

static bool may_lend(const heap_t *heap)
{
  return !heap->capture && !heap->quiesced;
}

static bool may_be_lent(const block_t *block)
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
      if (may_be_lent(b) && b->stamp > stamp && !owner_order_has_completed(b))
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
    uint64_t stamp = may_lend(h) ? owed_stamp(h) : 0;
    if (stamp)
      probes_add(&probes, owner_order_stream(h), stamp);
  }
  unlock(&device->lock);
  probes_ask(&probes, device->core, false);
}

/* ---- lending ----------------------------------------------------------- */

/* The list that the block belongs to; NULL: it may not be lent. */
static lenders_t *list_for(stitch_t *stitch, const heap_t *heap, const block_t *block)
{
  if (!may_be_lent(block) || !uses_have_completed(block))
    return NULL;
  if (owner_order_has_completed(block) || !RULE(LENT_PAGES_NEED_COMPLETION))
    return &stitch->completed;
  return block->segment->heap == heap ? &stitch->ordered : NULL;
}

static void add_lender(lenders_t *list, block_t *block)
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
    lenders_t *list = list_for(stitch, heap, b);
    size_t got = stitch_bytes(stitch);
    size_t size = list ? pages_within(b, enough - got, most - got, true, &first) : 0;
    b = size ? mapped_carve(b, first, size) : NULL;
    if (b)
      add_lender(list, b);
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
    for (int large = 1; large >= 0 && may_lend(from); large--)
      claim_from(stitch, heap, from, large, enough, most);
}

/* Moves a page. `orphan` NULL: it is not unmapped first. If the driver refuses, the page stays
 * where it was. If the driver will not even map it there again, the page is lost and counts as
 * having left. */
static esper_status move_page(const segment_t *from, const page_t *page, orphan_t *orphan,
                              block_t *into, size_t *left, size_t *moved)
{
  core_t *core = from->device->core;
  int device = from->device->index;
  uintptr_t address = page_address(from, page), to = into->address + *moved;
  size_t size = page_size(from, page);
  esper_status status = orphan ? call_page_unmap(core, device, address, size) : ESPER_OK;
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  status = peers_map(from->device, to, size, page->handle);
  if (status == ESPER_OK) {
    page_add(into->segment, to, size, page->handle);
    *moved += size;
    *left += size;
    return ESPER_OK;
  }
  error_from_driver(core, status);
  if (orphan && peers_map(from->device, address, size, page->handle) != ESPER_OK) {
    orphan_release_page(from->device, page->handle, size, orphan);
    *left += size;
  }
  return status;
}

/* `orphan` NULL: pages are not unmapped first. */
static esper_status move_all(lenders_t *list, orphan_t *orphan, block_t *into, size_t *moved,
                             size_t *pages)
{
  for (const block_t *b = list->first; b; b = b->newer)
    for (size_t at = 0; at < b->size;) {
      const page_t *page = page_at(b->segment, b->address + at);
      esper_status status = move_page(b->segment, page, orphan, into, &list->left, moved);
      if (status != ESPER_OK)
        return status;
      ++*pages;
      at += page_size(b->segment, page);
    }
  return ESPER_OK;
}

esper_status stitch_move(stitch_t *stitch, block_t *into, size_t *moved)
{
  *moved = 0;
  size_t *pages = &stitch->pages;
  esper_status status = move_all(&stitch->completed, stitch->orphan, into, moved, pages);
  return status == ESPER_OK ? move_all(&stitch->ordered, NULL, into, moved, pages) : status;
}

static void finish(lenders_t *list, bool stale)
{
  for (block_t *b = list->first, *next; b; b = next) {
    size_t gone = list->left < b->size ? list->left : b->size;
    next = b->newer;
    b->newer = NULL;
    list->left -= gone;
    mapped_left(b, gone, stale);
  }
}

void stitch_finish(stitch_t *stitch)
{
  finish(&stitch->completed, false);
  finish(&stitch->ordered, true);
}
