#include "mapped.h"

#include <stdlib.h>

#include "../base/call.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/map.h"
#include "../blocks/trace.h"
#include "../blocks/use.h"
#include "../pools/pool.h"
#include "../stats/stats.h"
#include "driver_pages.h"
#include "page_table.h"
#include "peers.h"
#include "segment.h"
#include "slack.h"

/* ---- holes ------------------------------------------------------------- */

/* Holes and stale blocks are in lists through `older` and `newer`. */
static void list_add(block_t **list, block_t *block, block_state state)
{
  block_set_state(block, state);
  block->older = NULL;
  block->newer = *list;
  if (*list)
    (*list)->older = block;
  *list = block;
}

static void list_remove(block_t **list, block_t *block)
{
  *(block->older ? &block->older->newer : list) = block->newer;
  if (block->newer)
    block->newer->older = block->older;
  block->older = block->newer = NULL;
}

static void link_hole(block_t *hole)
{
  list_add(&hole->segment->holes, hole, BLOCK_HOLE);
}

static void move_begin(block_t *hole, uintptr_t address)
{
  hole->size += hole->address - address;
  __atomic_store_n(&hole->address, address, __ATOMIC_RELAXED);
}

/* Links `block` in after `prev`. */
static void link_after(block_t *prev, block_t *block)
{
  block->prev = prev;
  block->next = prev->next;
  if (block->next)
    block->next->prev = block;
  prev->next = block;
}

block_t *hole_cut(block_t *hole, uintptr_t begin, uintptr_t end)
{
  segment_t *s = hole->segment;
  uintptr_t hole_end = hole->address + hole->size;
  cache_close(s->heap);
  if (begin == hole->address && end == hole_end) {
    list_remove(&s->holes, hole);
    block_set_state(hole, BLOCK_FILLING);
    return hole;
  }
  block_t *piece = block_make(s->device, s, begin, end - begin);
  if (!piece)
    return NULL;
  block_set_state(piece, BLOCK_FILLING);
  if (end == hole_end) {
    hole->size -= piece->size;
    link_after(hole, piece);
    return piece;
  }
  move_begin(hole, end);
  piece->next = hole;
  piece->prev = hole->prev;
  *(piece->prev ? &piece->prev->next : &s->first) = piece;
  hole->prev = piece;
  return piece;
}

static bool is_hole(const block_t *block)
{
  return block && block->state == BLOCK_HOLE;
}

/* Merges `hole` with the hole after it. */
static void unite_holes(block_t *hole)
{
  block_t *next = hole->next;
  list_remove(&hole->segment->holes, next);
  hole->size += next->size;
  hole->next = next->next;
  if (hole->next)
    hole->next->prev = hole;
  block_discard(block_device(hole), next);
}

void hole_close(block_t *piece)
{
  cache_close(piece->segment->heap);
  link_hole(piece);
  if (is_hole(piece->next))
    unite_holes(piece);
  if (is_hole(piece->prev))
    unite_holes(piece->prev);
}

/* ---- pages come and go ------------------------------------------------- */

/* How many stretches of memory touch the block. */
static int stretches_beside(const block_t *block)
{
  return (block->prev && block_is_mapped(block->prev)) +
         (block->next && block_is_mapped(block->next));
}

void mapped_arrived(block_t *piece)
{
  segment_t *s = piece->segment;
  size_t end = page_granule(s, piece->address + piece->size);
  cache_close(s->heap);
  s->bytes += piece->size;
  if (s->touched < end)
    s->touched = end;
  stats_pages_added(&s->device->stats, s->heap->pool->reserved_bytes, s->large, piece->size,
                    1 - stretches_beside(piece));
  trace_add_memory(s->device, ESPER_TRACE_SEGMENT_MAP, piece->address, piece->size,
                   s->heap->stream);
  block_set_state(piece, BLOCK_CLAIMED);
  map_insert(s->device->core->map, piece);
}

/* Accounts for a block that no longer has memory. */
static void lose_memory(block_t *block)
{
  segment_t *s = block->segment;
  s->bytes -= block->size;
  stats_pages_removed(&s->device->stats, s->heap->pool->reserved_bytes, s->large, block->size,
                      stretches_beside(block) - 1);
  trace_add_memory(s->device, ESPER_TRACE_SEGMENT_UNMAP, block->address, block->size,
                   s->heap->stream);
  uses_drop(s->device, block);
  map_remove(s->device->core->map, block);
  block->user = 0;
  block->capture = 0;
  block->withheld = false;
}

static void forget_pages(const block_t *block)
{
  segment_t *s = block->segment;
  for (size_t at = 0; at < block->size;) {
    page_t *page = page_at(s, block->address + at);
    at += page_size(s, page);
    page_remove(s, page);
  }
}

static void make_stale(block_t *block)
{
  segment_t *s = block->segment;
  size_t first = page_granule(s, block->address);
  for (size_t i = first; i < first + block->size / s->device->granule; i++)
    s->pages[i].stale = true;
  list_add(&s->device->stale, block, BLOCK_STALE);
}

void mapped_left(block_t *block, bool stale)
{
  cache_close(block->segment->heap);
  lose_memory(block);
  if (stale) {
    make_stale(block);
    return;
  }
  forget_pages(block);
  block->stamp = 0;
  hole_close(block);
}

static block_t *find_reapable(const device_t *device)
{
  block_t *block = device->stale;
  while (block && !owner_order_has_completed(block) && RULE(UNMAP_NEEDS_COMPLETION))
    block = block->newer;
  return block;
}

void mapped_reap(device_t *device)
{
  for (;;) {
    lock(&device->lock);
    block_t *block = find_reapable(device);
    pool_t *pool = block ? block->segment->heap->pool : NULL;
    if (block) {
      list_remove(&device->stale, block);
      block_set_state(block, BLOCK_FILLING);
      pool_enter(pool);
    }
    unlock(&device->lock);
    if (!block)
      return;
    driver_page_unmap(device, block->address, block->size);
    lock(&device->lock);
    pool_leave(pool);
    forget_pages(block);
    block->stamp = 0;
    hole_close(block);
    unlock(&device->lock);
  }
}

block_t *mapped_split(block_t *block, size_t size)
{
  block_t *rest = block_split(block_device(block), block, size);
  if (rest) {
    rest->withheld = block->withheld;
    rest->capture = block->capture;
  }
  return rest;
}

block_t *mapped_carve(block_t *block, uintptr_t begin, size_t size)
{
  block_t *front = begin > block->address ? block : NULL, *rest = NULL;
  free_blocks_claim(block);
  block_count_inactive(block);
  uses_drop_completed(block_device(block), block);
  if (front)
    block = mapped_split(front, begin - front->address);
  bool cut = block && (block->size == size || (rest = mapped_split(block, size)));
  if (block && !cut)
    free_blocks_add(block);
  if (front)
    free_blocks_add(front);
  if (rest)
    free_blocks_add(rest);
  return cut ? block : NULL;
}

void mapped_give_back(const segment_t *s, const page_t *page)
{
  driver_page_unmap(s->device, page_address(s, page), page_size(s, page));
  driver_page_release(s->device, page->handle);
}

void mapped_unmap(device_t *device, block_t *block)
{
  segment_t *s = block->segment;
  driver_page_unmap(device, block->address, block->size);
  for (size_t at = 0; at < block->size;) {
    const page_t *page = page_at(s, block->address + at);
    driver_page_release(device, page->handle);
    at += page_size(s, page);
  }
  lock(&device->lock);
  mapped_left(block, false);
  device->refused = 0;
  slack_begin_anew(s->heap->pool);
  unlock(&device->lock);
}

/* ---- segments ---------------------------------------------------------- */

size_t mapped_granule(device_t *device)
{
  if (atomic_load_explicit(&device->granule_known, memory_order_acquire))
    return device->granule;
  size_t granule = 0;
  esper_status status = call_page_granularity(device->core, device->index, &granule);
  if (status != ESPER_OK && status != ESPER_UNSUPPORTED) {
    error_from_driver(device->core, status);
    return 0;
  }
  lock(&device->lock);
  if (!atomic_load_explicit(&device->granule_known, memory_order_relaxed)) {
    device->granule = status == ESPER_OK ? granule : 0;
    atomic_store_explicit(&device->granule_known, true, memory_order_release);
  }
  unlock(&device->lock);
  return device->granule;
}

static segment_t *make_mapped(heap_t *heap, bool large, uintptr_t address, size_t size)
{
  device_t *device = heap->device;
  segment_t *s = arena_take(&device->segments);
  if (!s)
    return NULL;
  *s =
      (segment_t){.address = address, .size = size, .device = device, .heap = heap, .large = large};
  bool has_table = pages_create(s);
  block_t *hole = has_table ? block_make(device, s, address, size) : NULL;
  if (!hole || !map_insert_segment(device->core->map, s)) {
    if (hole)
      block_discard(device, hole);
    if (has_table)
      pages_destroy(s);
    arena_give(&device->segments, s);
    return NULL;
  }
  s->first = hole;
  s->sequence = device->next_sequence++;
  link_hole(hole);
  segment_link(s);
  return s;
}

esper_status mapped_reserve(heap_t *heap, bool large, size_t size)
{
  device_t *device = heap->device;
  core_t *core = device->core;
  /* Half as much again as the device has, because holes come and go. */
  size_t usual = device->total + device->total / 2;
  size = round_to_granule(device, size < usual ? usual : size);
  uintptr_t address;
  esper_status status = call_range_reserve(core, device->index, size, &address);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  lock(&device->lock);
  const segment_t *s = make_mapped(heap, large, address, size);
  unlock(&device->lock);
  if (s)
    return ESPER_OK;
  driver_range_free(device, address, size);
  return error_set(ESPER_HOST_MEMORY, "no host memory for a segment");
}

static segment_t *find_empty(device_t *device, const pool_t *pool)
{
  for (segment_t *s = device->first_segment; s; s = s->next)
    if (s->pages && block_state_of(s->first) == BLOCK_HOLE && !s->first->next &&
        (!pool || s->heap->pool == pool))
      return s;
  return NULL;
}

bool mapped_discard_empty(device_t *device, const pool_t *pool)
{
  core_t *core = device->core;
  lock(&device->lock);
  segment_t *s = find_empty(device, pool);
  if (s) { /* first out of the lists: see segment_release */
    block_set_state(s->first, BLOCK_FILLING);
    map_remove_segment(core->map, s);
    segment_unlink(s);
    pool_enter(s->heap->pool);
  }
  unlock(&device->lock);
  if (!s)
    return false;
  driver_range_free(device, s->address, s->size);
  lock(&device->lock);
  pool_leave(s->heap->pool);
  map_unreserve_segment(core->map);
  block_discard(device, s->first);
  pages_destroy(s);
  arena_give(&device->segments, s);
  unlock(&device->lock);
  return true;
}

void mapped_destroy(segment_t *s)
{
  device_t *device = s->device;
  for (size_t i = 0; i < s->touched; i++) {
    const page_t *page = &s->pages[i];
    if (!page->granules || page->first != i)
      continue;
    if (!page->absent)
      driver_page_unmap(device, page_address(s, page), page_size(s, page));
    if (!page->absent && !page->stale && !page->shared)
      driver_page_release(device, page->handle);
    free(page->shared); /* its name could not be withdrawn */
  }
  driver_range_free(device, s->address, s->size);
  pages_destroy(s);
}

bool mapped_is_valid(const segment_t *s)
{
  size_t holes = 0;
  for (const block_t *b = s->first; b; b = b->next)
    holes += b->state == BLOCK_HOLE;
  for (const block_t *b = s->holes; b; b = b->newer) {
    if (b->segment != s || b->state != BLOCK_HOLE || (b->newer && b->newer->older != b))
      return false;
    holes--;
  }
  return holes == 0 && pages_are_valid(s);
}

bool segment_is_valid(const segment_t *segment)
{
  size_t size = 0;
  for (const block_t *b = segment->first; b; b = b->next) {
    if (b->segment != segment || !block_is_valid(b))
      return false;
    size += b->size;
  }
  return size == segment->size &&
         (segment->pages ? mapped_is_valid(segment) : segment->bytes == size);
}
