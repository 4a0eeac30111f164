/* heap_release.c: memory that nobody uses goes back to the driver: whole classic
 * segments, and of mapped ones any pages. */
#include "heap.h"

#include "block.h"
#include "free_blocks.h"
#include "loose.h"
#include "mapped.h"
#include "page.h"
#include "pool.h"
#include "seal.h"
#include "segment.h"
#include "stream.h"
#include "use.h"

static bool is_idle(const block_t *block)
{
  const segment_t *s = block->segment;
  if (s->pinned)
    return false; /* whoever knows its address may still be using it */
  if (block->state != BLOCK_READY && block->state != BLOCK_PENDING)
    return false;
  if (s->captured && !RULE(GRAPHS_KEEP_MEMORY))
    return true;
  bool completed = uses_have_completed(block) && owner_order_has_completed(block);
  return pool_may_give_back(s) &&
         (completed || !(s->pages ? RULE(UNMAP_NEEDS_COMPLETION) : RULE(RELEASE_NEEDS_COMPLETION)));
}

/* Whole pages of an idle block, and on how many sides of them memory stays. */
typedef struct pages {
  block_t *block;
  uintptr_t first;
  size_t size;
  int beside;
} pages_t;

static int count_beside(const pages_t *p)
{
  const block_t *b = p->block;
  return (p->first > b->address || (b->prev && block_is_mapped(b->prev))) +
         (p->first + p->size < b->address + b->size || (b->next && block_is_mapped(b->next)));
}

/* Of a mapped segment: what leaves the fewest holes, if that is fewer than `best` does. */
static void find_pages(const segment_t *s, size_t enough, pages_t *best)
{
  for (block_t *b = s->first; b && (!best->block || best->beside); b = b->next) {
    pages_t found = {.block = b};
    found.size = is_idle(b) ? pages_within(b, enough, SIZE_MAX, false, &found.first) : 0;
    if (!found.size)
      continue;
    found.beside = count_beside(&found);
    if (!best->block || found.beside < best->beside)
      *best = found;
  }
}

static block_t *claim_segment(segment_t *s)
{
  if (s->first->next || !is_idle(s->first))
    return NULL;
  free_blocks_claim(s->first);
  free_blocks_satisfied(s->first);
  return s->first;
}

/* Whole stretches of memory go first, and what would part one goes last: so few holes are
 * left, and on the way there are never more stretches than before and after. */
static block_t *claim_idle(device_t *device, const pool_t *pool, const pool_t *but,
                           size_t enough)
{
  pages_t best = {0};
  block_t *block = NULL;
  for (segment_t *s = device->first_segment; s && !block; s = s->next) {
    if ((pool && s->heap->pool != pool) || s->heap->pool == but)
      continue;
    if (s->pages)
      find_pages(s, enough, &best);
    else
      block = claim_segment(s);
  }
  if (!block && best.block)
    block = mapped_carve(best.block, best.first, best.size);
  if (block)
    pool_enter(block->segment->heap->pool);
  return block;
}

/* Of one block; 0: none that would go. */
static size_t release_some(device_t *device, const pool_t *pool, const pool_t *but,
                           size_t enough)
{
  /* Or pages that moved would stay mapped where they were, and take room. */
  lock(&device->lock);
  while (mapped_has_reapable(device)) {
    unlock(&device->lock);
    if (!mapped_reap(device))
      return 0;
    lock(&device->lock);
  }
  block_t *block = claim_idle(device, pool, but, enough);
  pool_t *of = block ? block->segment->heap->pool : NULL;
  size_t size = block ? block->size : 0;
  unlock(&device->lock);
  if (!block)
    return 0;
  if (block->segment->pages)
    size = mapped_unmap(device, block);
  else if (!segment_release(device, block))
    size = 0;
  lock(&device->lock);
  pool_leave(of);
  unlock(&device->lock);
  return size;
}

size_t heap_release(device_t *device, const pool_t *pool, const pool_t *but, size_t enough)
{
  size_t released = loose_give_back(device), size = 1;
  seal_released(device, pool);
  while (size && released < enough)
    released += size = release_some(device, pool, but, enough - released);
  while (mapped_discard_empty(device, pool))
    ;
  lock(&device->lock);
  pool_collect(device);
  unlock(&device->lock);
  pool_bury(device);
  return released;
}

void heap_retire(device_t *device)
{
  stream_retire_all(device->core);
  lock(&device->lock);
  for (pool_t *pool = device->pools; pool; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap; heap = heap->next)
      free_blocks_promote(heap);
  unlock(&device->lock);
}
