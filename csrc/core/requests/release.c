#include "release.h"

#include <limits.h>

#include "../base/config.h"
#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/map.h"
#include "../blocks/use.h"
#include "../memory/fence.h"
#include "../memory/mapped.h"
#include "../memory/page_table.h"
#include "../memory/segment.h"
#include "../order/capturing.h"
#include "../order/retire.h"
#include "../pools/pool.h"
#include "quiesce.h"

static bool is_idle(const block_t *block)
{
  const segment_t *s = block->segment;
  if (s->pinned || !block_is_in_bin(block)) /* pinned: another process may still use it */
    return false;
  if (s->captured && !RULE(GRAPHS_KEEP_MEMORY))
    return true;
  bool needs = s->pages ? RULE(UNMAP_NEEDS_COMPLETION) : RULE(RELEASE_NEEDS_COMPLETION);
  return pool_may_give_back(s) && (block_owes_nothing(block) || !needs);
}

/* ---- what goes next ------------------------------------------------------ */

/* The part of a block that could go back: a whole classic segment, or whole pages of a mapped
 * one. */
typedef struct part {
  block_t *block;
  uintptr_t first;
  size_t size; /* 0: none */
  int beside;  /* on how many sides of the part memory stays */
} part_t;

/* The most blocks that are chosen in one walk over all blocks. */
enum { CHOSEN = 64 };

typedef struct release {
  device_t *device;
  const pool_t *pool; /* NULL: all */
  bool mind_captures;
  const bool *tags;  /* NULL: all */
  const pool_t *but; /* keeps its memory; NULL: none does */
  size_t enough, released;
  /* Blocks by address: they may change while the lock is dropped for a driver call. */
  uintptr_t chosen[CHOSEN];
  int count, beside;
  size_t bytes; /* of all chosen blocks */
} release_t;

static int count_beside(const part_t *p)
{
  const block_t *b = p->block;
  return (p->first > b->address || (b->prev && block_is_mapped(b->prev))) +
         (p->first + p->size < b->address + b->size || (b->next && block_is_mapped(b->next)));
}

static part_t part_of(block_t *b, size_t enough)
{
  part_t part = {.block = b, .first = b->address};
  if (!(b->segment->pages || block_is_whole_segment(b)) || !is_idle(b))
    return part;
  part.size = b->size;
  if (b->segment->pages)
    part.size = pages_within(b, enough, SIZE_MAX, &part.first);
  part.beside = part.size ? count_beside(&part) : 0;
  return part;
}

static block_t *claim_segment(block_t *block)
{
  free_blocks_claim(block);
  block_count_inactive(block);
  return block;
}

/* Takes the lock. Asks about captures each time, because one may have begun meanwhile. */
static void begin(release_t *r)
{
  lock(&r->device->lock);
  caches_close(r->device);
  r->but = r->mind_captures && capturing_is_possible(r->device) ? r->device->default_pool : NULL;
}

static bool is_of_interest(const release_t *r, const segment_t *s)
{
  const pool_t *pool = s->heap->pool;
  return (!r->pool || pool == r->pool) && pool != r->but && (!r->tags || r->tags[s->heap->tag]);
}

/* Parts with memory on no side go first, and those with memory on both sides last. So few holes are
 * left, and at no time there are more stretches of memory than before or after. */
static void choose(release_t *r, const part_t *part)
{
  if (part->beside < r->beside) {
    r->beside = part->beside;
    r->count = 0;
    r->bytes = 0;
  }
  if (part->beside > r->beside || r->count == CHOSEN)
    return;
  r->chosen[r->count++] = part->block->address;
  r->bytes += part->size;
}

static bool is_done(const release_t *r)
{
  return !r->beside && (r->count == CHOSEN || r->bytes >= r->enough - r->released);
}

static void choose_next(release_t *r)
{
  r->count = 0;
  r->bytes = 0;
  r->beside = INT_MAX; /* more than any part has */
  for (segment_t *s = r->device->first_segment; s && !is_done(r); s = s->next)
    for (block_t *b = is_of_interest(r, s) ? s->first : NULL; b && !is_done(r);
         b = s->pages ? b->next : NULL) {
      part_t part = part_of(b, r->enough - r->released);
      if (part.size)
        choose(r, &part);
    }
}

/* Claims a chosen part. NULL: it cannot go any more. Under the lock. */
static block_t *claim_chosen(const release_t *r, uintptr_t address)
{
  block_t *block = map_find(r->device->core->map, address);
  const segment_t *s = block ? block_segment_if_any(block) : NULL;
  if (!s || s->device != r->device || !is_of_interest(r, s))
    return NULL;
  part_t part = part_of(block, r->enough - r->released);
  if (!part.size)
    return NULL;
  return s->pages ? mapped_carve(block, part.first, part.size) : claim_segment(block);
}

/* Gives a claimed block (may be NULL) back: a classic segment, or pages. Called under the growth
 * lock and the device's, which it drops. Returns the bytes that went. */
static size_t give_back(device_t *device, block_t *block)
{
  size_t size = block ? block->size : 0;
  pool_t *of = block ? block->segment->heap->pool : NULL;
  if (of)
    pool_enter(of);
  unlock(&device->lock);
  if (!of)
    return 0;
  if (block->segment->pages) {
    mapped_unmap(device, block);
  } else if (block->segment->fenced) {
    fence_release(device, block);
  } else if (of->source.obtain) { /* which may wait for something that another thread holds */
    unlock(&device->growth_lock);
    segment_release(device, block);
    lock(&device->growth_lock);
  } else {
    segment_release(device, block);
  }
  lock(&device->lock);
  pool_leave(of);
  unlock(&device->lock);
  return size;
}

/* Gives one round of chosen blocks back. False: there is nothing more. The first block is claimed
 * under the lock under which it was chosen; later ones may be gone. */
static bool release_some(release_t *r)
{
  begin(r);
  choose_next(r);
  size_t first = give_back(r->device, r->count ? claim_chosen(r, r->chosen[0]) : NULL);
  r->released += first;
  for (int i = 1; first && i < r->count && r->released < r->enough; i++) {
    begin(r);
    r->released += give_back(r->device, claim_chosen(r, r->chosen[i]));
  }
  return first > 0;
}

/* ---- fences --------------------------------------------------------------- */

static bool is_freed_fence(const block_t *block)
{
  const segment_t *s = block->segment;
  return s->fenced && !s->pinned && block_is_in_bin(block) && pool_may_give_back(s);
}

/* The oldest freed block with a fence that owes nothing, or that still owes owner order. Blocks are
 * pending in the order of their frees, so if one owes it, the later ones do, too. At most `most`
 * blocks that wait only for other streams' uses are passed over. NULL: none. */
static block_t *oldest_fence(const heap_t *heap, size_t most)
{
  for (block_t *b = heap->oldest_pending; b; b = b->newer) {
    heap->device->fences.looked_at++;
    if (!is_freed_fence(b))
      continue;
    if (!owner_order_has_completed(b) || uses_have_completed(b) || !RULE(FENCE_NEEDS_COMPLETION))
      return b;
    if (!most--)
      return NULL;
  }
  return NULL;
}

/* Asks about the work that freed blocks behind fences wait for. */
static void ask_about_fences(device_t *device, size_t most)
{
  probes_t probes;
  probes.count = 0;
  stream_retire_all(device->core);
  lock(&device->lock);
  for (const heap_t *heap = device->default_pool->heaps; heap; heap = heap->next) {
    const block_t *b = heap->capture ? NULL : oldest_fence(heap, most);
    if (!b || owner_order_has_completed(b))
      continue;
    probes_add(&probes, owner_order_stream(heap), b->stamp);
    probes_add(&probes, owner_order_stream(heap), heap->newest_pending->stamp);
  }
  unlock(&device->lock);
  probes_ask(&probes, device->core, false);
}

static block_t *claim_fence(device_t *device, size_t most)
{
  for (const heap_t *heap = device->default_pool->heaps; heap; heap = heap->next) {
    block_t *b = oldest_fence(heap, most);
    if (b && (block_owes_nothing(b) || !RULE(FENCE_NEEDS_COMPLETION)))
      return claim_segment(b);
  }
  return NULL;
}

size_t release_fenced(device_t *device, size_t most)
{
  size_t released = 0, one;
  if (capturing_is_possible_now(device))
    return 0;
  ask_about_fences(device, most);
  lock(&device->growth_lock);
  do {
    lock(&device->lock);
    released += one = give_back(device, claim_fence(device, most));
  } while (one);
  unlock(&device->growth_lock);
  return released;
}

static size_t release(release_t r)
{
  device_t *device = r.device;
  r.released = release_fenced(device, SIZE_MAX);
  quiesce_unreferenced(device, r.pool);
  lock(&device->growth_lock);
  do
    mapped_reap(device);
  while (r.released < r.enough && release_some(&r));
  while (mapped_discard_empty(device, r.pool))
    ;
  unlock(&device->growth_lock);
  lock(&device->lock);
  pool_collect(device);
  unlock(&device->lock);
  pool_bury(device);
  return r.released;
}

size_t release_cached(device_t *device, const pool_t *pool, bool mind_captures, size_t enough)
{
  return release((
      release_t){.device = device, .pool = pool, .mind_captures = mind_captures, .enough = enough});
}

size_t release_tagged(device_t *device, const bool tags[TAGS])
{
  return release((release_t){.device = device, .tags = tags, .enough = SIZE_MAX});
}
