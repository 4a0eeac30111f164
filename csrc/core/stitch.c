#include "stitch.h"

#include "call.h"
#include "error.h"
#include "free_blocks.h"
#include "mapped.h"
#include "page.h"
#include "pool.h"
#include "stream.h"
#include "use.h"

static bool owes_nothing(const block_t *block)
{
  return (uses_have_completed(block) && owner_order_has_completed(block)) ||
         !RULE(LENT_PAGES_NEED_COMPLETION);
}

static bool may_lend(const heap_t *heap)
{
  return !heap->capture && !heap->sealed;
}

static bool may_be_lent(const block_t *block)
{
  const segment_t *s = block->segment;
  return s->pages && !s->pinned && pool_may_give_back(s);
}

/* ---- what has completed ------------------------------------------------ */

/* The latest stamp of large free blocks of the heap whose owner order is not known
 * to have completed. 0: none. */
static uint64_t owed_stamp(heap_t *heap)
{
  size_t granule = heap->pool->device->granule;
  uint64_t stamp = 0;
  free_blocks_promote(heap);
  for (int large = 0; large < 2; large++) {
    const bins_t *bins = &heap->ready[large];
    for (const block_t *b = bins_best_fit(bins, granule); b; b = bins_next(bins, b))
      if (may_be_lent(b) && b->stamp > stamp && !owner_order_has_completed(b))
        stamp = b->stamp;
  }
  return stamp;
}

void stitch_learn(heap_t *heap)
{
  enum { PROBES = 16 };
  struct {
    stream_t *stream;
    uint64_t stamp;
  } probes[PROBES];
  device_t *device = heap->pool->device;
  int count = 0;
  if (heap->pool != &device->default_pool || heap->capture)
    return;
  lock(&device->lock);
  for (heap_t *h = heap->pool->heaps; h && count < PROBES; h = h->next) {
    uint64_t stamp = may_lend(h) ? owed_stamp(h) : 0;
    if (stamp) {
      probes[count].stream = h->stream;
      probes[count++].stamp = stamp;
    }
  }
  unlock(&device->lock);
  for (int i = 0; i < count; i++) {
    record_t *probe = stream_probe(probes[i].stream, probes[i].stamp);
    if (probe)
      record_drop(probe);
  }
  if (count)
    stream_retire_all(device->core);
}

/* ---- lending ----------------------------------------------------------- */

/* Claims what the heap's free blocks of one size class have. */
static size_t claim_from(heap_t *heap, bool large, size_t enough, size_t most,
                         block_t ***end)
{
  const bins_t *bins = &heap->ready[large];
  size_t sum = 0;
  block_t *next;
  for (block_t *b = bins_best_fit(bins, heap->pool->device->granule); b && sum < enough; b = next) {
    uintptr_t first;
    next = bins_next(bins, b);
    if (!may_be_lent(b) || !owes_nothing(b))
      continue;
    size_t size = pages_within(b, enough - sum, most - sum, true, &first);
    b = size ? mapped_carve(b, first, size) : NULL;
    if (!b)
      continue;
    b->newer = NULL;
    **end = b;
    *end = &b->newer;
    sum += size;
  }
  return sum;
}

size_t stitch_claim(heap_t *heap, size_t enough, size_t most, block_t **lenders)
{
  block_t **end = lenders;
  size_t sum = 0;
  *lenders = NULL;
  if (heap->pool != &heap->pool->device->default_pool || heap->capture)
    return 0;
  for (heap_t *h = heap->pool->heaps; h && sum < enough; h = h->next)
    for (int large = 1; large >= 0 && may_lend(h); large--)
      sum += claim_from(h, large, enough - sum, most - sum, &end);
  return sum;
}

/* Refused: the page is where it was; or, if the driver would not even have it there
 * again, it is gone, and *left is raised all the same. */
static esper_status move_page(const segment_t *from, const page_t *page, block_t *into,
                              size_t *left, size_t *moved)
{
  core_t *core = from->device->core;
  int device = from->device->index;
  uintptr_t address = page_address(from, page), to = into->address + *moved;
  size_t size = page_size(from, page);
  esper_status status = call_page_unmap(core, device, address, size);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  status = call_page_map(core, device, to, size, page->handle);
  if (status == ESPER_OK) {
    page_add(into->segment, to, size, page->handle);
    *moved += size;
    *left += size;
    return ESPER_OK;
  }
  error_from_driver(core, status);
  if (call_page_map(core, device, address, size, page->handle) != ESPER_OK) {
    call_page_release(core, device, page->handle);
    *left += size;
  }
  return status;
}

esper_status stitch_move(const block_t *lenders, block_t *into, size_t *left, size_t *moved)
{
  *left = *moved = 0;
  for (const block_t *b = lenders; b; b = b->newer)
    for (size_t at = 0; at < b->size;) {
      const page_t *page = page_at(b->segment, b->address + at);
      esper_status status = move_page(b->segment, page, into, left, moved);
      if (status != ESPER_OK)
        return status;
      at += page_size(b->segment, page);
    }
  return ESPER_OK;
}

void stitch_finish(block_t *lenders, size_t left)
{
  for (block_t *b = lenders, *next; b; b = next) {
    size_t gone = left < b->size ? left : b->size;
    next = b->newer;
    b->newer = NULL;
    left -= gone;
    mapped_left(b, gone);
  }
}
