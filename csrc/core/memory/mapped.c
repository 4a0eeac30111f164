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
#include "page_table.h"
#include "peers.h"
#include "segment.h"
#include "slack.h"

static device_t *device_of(const block_t *block)
{
  return block->segment->device;
}

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

/* The caller has left a block in the arena, so this cannot fail. */
static block_t *cut_off(block_t *piece, size_t size)
{
  cache_close(piece->segment->heap);
  block_t *rest =
      block_make(device_of(piece), piece->segment, piece->address + size, piece->size - size);
  if (!rest)
    abort(); /* the caller broke its promise */
  piece->size = size;
  block_set_state(rest, BLOCK_FILLING);
  link_after(piece, rest);
  return rest;
}

void hole_cut_back(block_t *piece, size_t size)
{
  hole_close(cut_off(piece, size));
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
  block_discard(device_of(hole), next);
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
  stats_pages_added(&s->device->stats, s->heap->pool->stats, s->large, piece->size,
                    1 - stretches_beside(piece));
  trace_add(s->device, ESPER_TRACE_SEGMENT_MAP, piece->address, piece->size, s->heap->stream);
  block_set_state(piece, BLOCK_CLAIMED);
  map_insert(s->device->core->map, piece);
}

/* Accounts for a block that no longer has memory. */
static void lose_memory(block_t *block)
{
  segment_t *s = block->segment;
  s->bytes -= block->size;
  stats_pages_removed(&s->device->stats, s->heap->pool->stats, s->large, block->size,
                      stretches_beside(block) - 1);
  trace_add(s->device, ESPER_TRACE_SEGMENT_UNMAP, block->address, block->size, s->heap->stream);
  uses_drop(s->device, block);
  map_remove(s->device->core->map, block);
  block->user = 0;
  block->capture = 0;
  block->withheld = false;
}

static void forget_pages(const block_t *block, size_t size)
{
  segment_t *s = block->segment;
  for (size_t at = 0; at < size;) {
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

void mapped_left(block_t *block, size_t size, bool stale)
{
  cache_close(block->segment->heap);
  block_t *rest = block;
  if (size) {
    rest = size < block->size ? block_split(device_of(block), block, size) : NULL;
    lose_memory(block);
    if (stale) {
      make_stale(block);
    } else {
      forget_pages(block, size);
      block->stamp = 0;
      hole_close(block);
    }
  }
  if (rest)
    free_blocks_add(rest);
}

static block_t *find_reapable(const device_t *device)
{
  block_t *block = device->stale;
  while (block && !owner_order_has_completed(block) && RULE(UNMAP_NEEDS_COMPLETION))
    block = block->newer;
  return block;
}

static esper_status unmap_stale(const block_t *block, size_t *gone)
{
  const segment_t *s = block->segment;
  esper_status status = ESPER_OK;
  for (*gone = 0; status == ESPER_OK && *gone < block->size;) {
    const page_t *page = page_at(s, block->address + *gone);
    status = call_page_unmap(s->device->core, s->device->index, page_address(s, page),
                             page_size(s, page));
    if (status == ESPER_OK)
      *gone += page_size(s, page);
    else
      error_from_driver(s->device->core, status);
  }
  return status;
}

/* Makes the first `gone` bytes a hole. The others stay stale. */
static void reaped(block_t *block, size_t gone)
{
  if (gone < block->size) {
    block_t *rest = block;
    if (gone) {
      rest = cut_off(block, gone);
      rest->stamp = block->stamp;
    }
    list_add(&device_of(rest)->stale, rest, BLOCK_STALE);
  }
  if (gone) {
    forget_pages(block, gone);
    block->stamp = 0;
    hole_close(block);
  }
}

bool mapped_reap(device_t *device)
{
  esper_status status = ESPER_OK;
  bool more = true;
  while (status == ESPER_OK && more) {
    lock(&device->lock);
    block_t *block = find_reapable(device);
    void *spare = block ? arena_take(&device->blocks) : NULL; /* for the rest, if it is cut */
    if (spare) {
      list_remove(&device->stale, block);
      block_set_state(block, BLOCK_FILLING);
      pool_enter(block->segment->heap->pool);
    }
    unlock(&device->lock);
    if (block && !spare) {
      error_set(ESPER_HOST_MEMORY, "no host memory for a block");
      return false;
    }
    more = block != NULL;
    if (!more)
      continue;
    size_t gone;
    paging_begin(device);
    status = unmap_stale(block, &gone);
    lock(&device->lock);
    arena_give(&device->blocks, spare);
    pool_leave(block->segment->heap->pool);
    reaped(block, gone);
    unlock(&device->lock);
    paging_end(device);
  }
  return status == ESPER_OK;
}

block_t *mapped_split(block_t *block, size_t size)
{
  block_t *rest = block_split(device_of(block), block, size);
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
  uses_drop_completed(device_of(block), block);
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

/* Gives the handle back first. If the driver refuses, nothing has happened. If it then refuses to
 * unmap the page, the page stays and is only never lent. */
bool mapped_give_back(const segment_t *s, page_t *page)
{
  core_t *core = s->device->core;
  int device = s->device->index;
  esper_status status = page->released ? ESPER_OK : call_page_release(core, device, page->handle);
  if (status == ESPER_OK) {
    for (size_t i = page->first; i < page->first + (size_t)page->granules; i++)
      s->pages[i].released = true;
    status = call_page_unmap(core, device, page_address(s, page), page_size(s, page));
  }
  if (status != ESPER_OK)
    error_from_driver(core, status);
  return status == ESPER_OK;
}

/* A spare block for the split that is needed if the driver refuses halfway. */
static void *take_spare(device_t *device)
{
  lock(&device->lock);
  void *spare = arena_take(&device->blocks);
  unlock(&device->lock);
  return spare;
}

size_t mapped_unmap(device_t *device, block_t *block)
{
  segment_t *s = block->segment;
  size_t gone = 0;
  page_t *page;
  void *spare = take_spare(device);
  paging_begin(device);
  while (spare && gone < block->size &&
         mapped_give_back(s, page = page_at(s, block->address + gone)))
    gone += page_size(s, page);
  lock(&device->lock);
  if (spare)
    arena_give(&device->blocks, spare);
  mapped_left(block, gone, false);
  if (gone) {
    device->refused = 0;
    slack_begin_anew(s->heap->pool);
  }
  unlock(&device->lock);
  paging_end(device);
  return gone;
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
  call_range_free(core, device->index, address, size);
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
  esper_status status = call_range_free(core, device->index, s->address, s->size);
  if (status != ESPER_OK)
    error_from_driver(core, status);
  lock(&device->lock);
  pool_leave(s->heap->pool);
  if (status == ESPER_OK) {
    map_unreserve_segment(core->map);
    block_discard(device, s->first);
    pages_destroy(s);
    arena_give(&device->segments, s);
  } else {
    block_set_state(s->first, BLOCK_HOLE);
    map_insert_reserved(core->map, s);
    segment_link(s);
  }
  unlock(&device->lock);
  return status == ESPER_OK;
}

void mapped_destroy(segment_t *s)
{
  core_t *core = s->device->core;
  int device = s->device->index;
  bool empty = true;
  for (size_t i = 0; i < s->touched; i++) {
    const page_t *page = &s->pages[i];
    if (!page->granules || page->first != i || page->absent)
      continue;
    if (call_page_unmap(core, device, page_address(s, page), page_size(s, page)) != ESPER_OK)
      empty = false;
    if (!page->released && !page->stale && !page->shared)
      call_page_release(core, device, page->handle);
  }
  if (empty)
    call_range_free(core, device, s->address, s->size);
  for (size_t i = 0; i < s->touched; i++)
    if (s->pages[i].granules && s->pages[i].first == i)
      free(s->pages[i].shared); /* its name could not be withdrawn */
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
