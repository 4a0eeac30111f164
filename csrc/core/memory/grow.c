/* grow.c: how a heap grows by pages. In one of its holes, the bytes that are missing between free
 * neighbours are filled: with moved pages (stitch.h) and new ones, or with new ones alone where
 * slack allows it. Blocks are claimed under the lock, pages are mapped without it, and then the
 * lists and statistics are updated. If the driver refuses, all is as it was before. */
#include "grow.h"

#include "../base/call.h"
#include "../base/config.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../pools/pool.h"
#include "../stats/stats.h"
#include "driver_pages.h"
#include "mapped.h"
#include "page_table.h"
#include "peers.h"
#include "segment.h"
#include "slack.h"
#include "stitch.h"

/* A page costs the same up to LARGE_PAGE, whatever its size; a larger one costs as much as several,
 * so only huge requests have those: about MANY_PAGES, of at most HUGE_PAGE. While memory is short,
 * a page is at most TIGHT_PAGE large, and at most 1/PAGES of the request. */
enum { LARGE_PAGE = 32 << 20, TIGHT_PAGE = 8 << 20, HUGE_PAGE = 128 << 20 };
enum { PAGES = 5, MANY_PAGES = 32 };

/* Inside this file: no hole of the heap is large enough. Not an error; grow() handles it. */
#define NO_HOLE ESPER_NOT_READY

/* The part of a hole that makes a block of the wanted size once it is filled, together with the
 * free blocks beside it. */
typedef struct window {
  block_t *hole;
  block_t *before, *after; /* the free neighbours it needs, or NULL */
  size_t missing;          /* bytes to fill */
  bool from_end;           /* they lie at the end of the hole */
} window_t;

typedef struct growth {
  device_t *device;
  heap_t *heap;
  size_t size;
  bool large;
  pages_from_t from;
  window_t window;
  block_t *piece;       /* cut out of the hole */
  stitch_t stitch;      /* the moved pages */
  size_t created;       /* bytes of new pages */
  size_t new_page_size; /* the last one may be smaller */
  size_t made;          /* bytes of them before the driver refused */
  bool slack;           /* some new pages could have been moved ones */
} growth_t;

/* ---- where ------------------------------------------------------------- */

static size_t ready_size(const block_t *block)
{
  return block && block->state == BLOCK_READY ? block->size : 0;
}

static window_t window_at(const growth_t *g, block_t *hole)
{
  /* No neighbour is as large as the request, or it would have been taken. */
  size_t before = ready_size(hole->prev), after = ready_size(hole->next);
  window_t best = {0};
  if (before + hole->size >= g->size)
    best = (window_t){.hole = hole,
                      .before = before ? hole->prev : NULL,
                      .missing = round_to_granule(g->device, g->size - before)};
  if (after && after + hole->size >= g->size && (!best.hole || g->size - after < best.missing))
    best = (window_t){.hole = hole,
                      .after = hole->next,
                      .from_end = true,
                      .missing = round_to_granule(g->device, g->size - after)};
  if (before && after && before + hole->size + after >= g->size &&
      (!best.hole || hole->size < best.missing))
    best =
        (window_t){.hole = hole, .before = hole->prev, .after = hole->next, .missing = hole->size};
  return best;
}

/* The window that misses least; of equal ones, that in the smallest hole. */
static window_t find_window(const growth_t *g)
{
  window_t best = {0};
  for (segment_t *s = g->device->first_segment; s; s = s->next)
    if (s->pages && s->heap == g->heap && s->large == g->large)
      for (block_t *hole = s->holes; hole; hole = hole->newer) {
        window_t w = window_at(g, hole);
        if (w.hole && (!best.hole || w.missing < best.missing ||
                       (w.missing == best.missing && hole->size < best.hole->size)))
          best = w;
      }
  return best;
}

/* ---- what is claimed --------------------------------------------------- */

static void claim_neighbours(const window_t *w)
{
  if (w->before)
    free_blocks_claim(w->before);
  if (w->after)
    free_blocks_claim(w->after);
}

static size_t least(size_t a, size_t b)
{
  return a < b ? a : b;
}

/* Whether the driver refused nothing, and an eighth of the memory stays free. */
static bool memory_is_plentiful(const device_t *device, size_t missing)
{
  size_t all = least(device->limit, device->total);
  size_t reserved = (size_t)device->stats.reserved_bytes[ESPER_ALL].current;
  return !device->refused && reserved + missing <= all - all / 8 &&
         segment_may_come(device, missing + all / 8);
}

/* A page can move only when all of it is free, so large pages waste memory. Those of private
 * pools never move. Pages of small blocks are one granule. */
static size_t new_page_size(const growth_t *g, size_t created)
{
  size_t granule = g->device->granule;
  size_t size = config_of(g->device->core)->as_given.large_segment_size; /* if set by the user */
  if (!g->large)
    return granule;
  if (!size && !slack_is_for(g->heap->pool))
    size = g->size;
  else if (!size && !memory_is_plentiful(g->device, created))
    size = least(g->size / PAGES, TIGHT_PAGE);
  else if (!size)
    size = g->size / MANY_PAGES > LARGE_PAGE ? least(g->size / MANY_PAGES, HUGE_PAGE) : LARGE_PAGE;
  return size > granule ? size / granule * granule : granule;
}

static esper_status cut_piece(growth_t *g)
{
  const window_t *w = &g->window;
  size_t moved = stitch_bytes(&g->stitch), size = moved > w->missing ? moved : w->missing;
  uintptr_t begin = w->hole->address + (w->from_end ? w->hole->size - size : 0);
  size_t created = size - moved, page_size = new_page_size(g, created);
  esper_status status = segment_check_limits(g->device, created);
  if (status != ESPER_OK)
    return status;
  g->created = created;
  g->new_page_size = page_size;
  g->piece = hole_cut(w->hole, begin, begin + size);
  if (!g->piece)
    return error_set(ESPER_HOST_MEMORY, "no host memory for a block");
  g->device->reserving += created;
  return ESPER_OK;
}

/* May merge these blocks, so they are not valid afterwards. */
static void free_neighbours(const window_t *w)
{
  if (w->before)
    free_blocks_add(w->before);
  if (w->after)
    free_blocks_add(w->after);
}

/* Claims pages to move, but none for NEW_PAGES. ANY_PAGES lets go of them if slack (slack.h) allows
 * new ones. stitch.h says which pages may move. */
static void claim_pages(growth_t *g)
{
  const window_t *w = &g->window;
  size_t most = w->before && w->after ? w->missing : w->hole->size;
  stitch_claim(&g->stitch, g->heap, g->from == NEW_PAGES ? 0 : w->missing, most);
  if (g->from != ANY_PAGES ||
      !slack_allows_new_pages(g->device, w->missing, stitch_bytes(&g->stitch) > 0))
    return;
  stitch_finish(&g->stitch, false);
  stitch_claim(&g->stitch, g->heap, 0, 0);
  g->slack = true;
}

/* Claims a window and pages for it. If another thread freed a block that fits meanwhile, claims
 * that block instead, and stores it. NO_HOLE: there is no window. */
static esper_status claim_window(growth_t *g, block_t **block)
{
  cache_close(g->heap);
  *block = free_blocks_best_ready(g->heap, g->size, g->large);
  if (*block) {
    free_blocks_claim(*block);
    return ESPER_OK;
  }
  window_t *w = &g->window;
  *w = find_window(g);
  if (!w->hole)
    return NO_HOLE;
  claim_neighbours(w);
  claim_pages(g);
  esper_status status = cut_piece(g);
  if (status != ESPER_OK) {
    stitch_finish(&g->stitch, false);
    free_neighbours(w);
  }
  return status;
}

/* ---- pages ------------------------------------------------------------- */

/* Without this check, a driver that has too little would first give all it has, page by page, and
 * other threads would find no memory meanwhile. */
static esper_status check_free_memory(const growth_t *g)
{
  enum { FEW = 16 }; /* pages that are tried without asking */
  size_t free, total;
  if (g->created <= FEW * g->new_page_size)
    return ESPER_OK;
  core_t *core = g->device->core;
  uint64_t whole;
  esper_status status = call_memory_info(core, g->device->index, &free, &total);
  if (status != ESPER_OK)
    return error_from_driver(core, status);
  if (free >= g->created)
    return ESPER_OK;
  /* The driver may have more than it reports as free, such as caches of the system. One allocation
   * of the whole size finds out. */
  status = driver_page_create(g->device, g->created, &whole);
  if (status == ESPER_OK)
    driver_page_release(g->device, whole);
  return status;
}

/* New pages fill what the moved ones leave of the piece. */
static esper_status add_pages(growth_t *g)
{
  segment_t *s = g->piece->segment;
  uintptr_t first = g->piece->address + stitch_bytes(&g->stitch);
  while (g->made < g->created) {
    size_t size = least(g->created - g->made, g->new_page_size);
    uint64_t handle;
    esper_status status = driver_page_add(g->device, first + g->made, size, &handle);
    if (status != ESPER_OK)
      return status;
    page_add(s, first + g->made, size, handle);
    g->made += size;
  }
  return ESPER_OK;
}

static void give_pages_back(const growth_t *g)
{
  segment_t *s = g->piece->segment;
  uintptr_t first = g->piece->address + stitch_bytes(&g->stitch);
  for (size_t at = 0; at < g->made;) {
    page_t *page = page_at(s, first + at);
    at += page_size(s, page);
    mapped_give_back(s, page);
    page_remove(s, page);
  }
}

/* ---- the books --------------------------------------------------------- */

/* Merges the piece and its neighbours into one block. */
static block_t *unite(const growth_t *g)
{
  block_t *block = g->piece;
  if (g->window.after)
    block_merge_next(g->device, block);
  if (g->window.before) {
    block = g->window.before;
    block_merge_next(g->device, block);
  }
  return block;
}

/* Notes how much memory the driver refused. If pages could have moved instead, the refusal does
 * not mean that the heap cannot grow. */
static void note_refusal(growth_t *g, esper_status status)
{
  device_t *device = g->device;
  if (status == ESPER_OUT_OF_MEMORY && g->slack)
    slack_was_refused(device);
  else if (status == ESPER_OUT_OF_MEMORY)
    device->refused = g->created - g->made;
  else if (status == ESPER_OK && g->created >= device->refused)
    device->refused = 0;
}

/* Updates lists and statistics. NULL: the driver refused. */
static block_t *keep_books(growth_t *g, esper_status status)
{
  cache_close(g->heap);
  g->device->reserving -= g->created;
  note_refusal(g, status);
  stitch_finish(&g->stitch, status == ESPER_OK);
  if (status == ESPER_OK) {
    if (RULE(MOVED_PAGES_KEEP_STAMP))
      g->piece->stamp = g->stitch.stamp;
    mapped_arrived(g->piece);
    return unite(g);
  }
  hole_close(g->piece);
  free_neighbours(&g->window);
  return NULL;
}

/* What was claimed is free again if the driver refuses. */
static esper_status fill(growth_t *g, block_t **block)
{
  device_t *device = g->device;
  size_t moved = 0;
  esper_status status = check_free_memory(g);
  if (status == ESPER_OK)
    status = add_pages(g);
  if (status == ESPER_OK)
    status = stitch_move(&g->stitch, g->piece, &moved);
  if (status != ESPER_OK)
    give_pages_back(g);
  lock(&device->lock);
  device->counters.pages_moved += moved;
  stretch_peaks_t peaks = stats_stretches_begin(&device->stats);
  *block = keep_books(g, status);
  stats_stretches_end(&device->stats, peaks);
  unlock(&device->lock);
  return status;
}

/* ESPER_OUT_OF_MEMORY and *slack: pages can move instead. NO_HOLE: see claim_window. */
static esper_status grow_by(pages_from_t from, heap_t *heap, size_t size, bool large,
                            block_t **block, bool *slack)
{
  growth_t g = {.device = heap->device, .heap = heap, .size = size, .large = large, .from = from};
  if (!heap->capture) {
    if (from != NEW_PAGES)
      stitch_learn(heap);
    mapped_reap(g.device);
  }
  lock(&g.device->lock);
  esper_status status = claim_window(&g, block);
  *slack = g.slack;
  unlock(&g.device->lock);
  if (status != ESPER_OK || *block)
    return status;
  return fill(&g, block);
}

/* If there is no memory for slack, tries again with moved pages. */
static esper_status grow_mapped(heap_t *heap, size_t size, bool large, pages_from_t from,
                                block_t **block)
{
  bool slack;
  esper_status status = grow_by(from, heap, size, large, block, &slack);
  if (status == ESPER_OUT_OF_MEMORY && slack)
    status = grow_by(MOVED_FIRST, heap, size, large, block, &slack);
  return status;
}

/* ---- which kind -------------------------------------------------------- */

/* Libraries such as NCCL register the memory of a created pool by segment and do not hear of pages,
 * so such a pool has pages only on request. */
static bool wants_pages(const pool_t *pool)
{
  esper_segments segments = config_of(pool->device->core)->as_given.segments;
  return !pool->source.obtain && segments != ESPER_SEGMENTS_CLASSIC &&
         (segments == ESPER_SEGMENTS_MAPPED || !pool->created);
}

size_t grow_size(const pool_t *pool, size_t size)
{
  const device_t *device = pool->device;
  bool pages = wants_pages(pool) &&
               atomic_load_explicit(&device->granule_known, memory_order_acquire) &&
               device->granule;
  return pages ? round_to_granule(device, size)
               : config_segment_size(config_of(device->core), size);
}

esper_status grow(heap_t *heap, size_t size, bool large, pages_from_t from, block_t **block)
{
  device_t *device = heap->device;
  *block = NULL;
  if (wants_pages(heap->pool) && mapped_granule(device)) {
    esper_status status = grow_mapped(heap, size, large, from, block);
    while (status == NO_HOLE && mapped_reserve(heap, large, size) == ESPER_OK)
      status = grow_mapped(heap, size, large, from, block);
    if (status != NO_HOLE)
      return status;
  }
  /* The device maps no pages, or there are no addresses for a mapped segment. */
  return segment_obtain(heap, config_segment_size(config_of(device->core), size), large, block);
}
