/* checkpoint_restore.c: restores a checkpoint. First it makes sure that nothing can fail. Then it
 * takes every block of the pool back, cuts and merges the blocks as they were, and makes live again
 * what was live. */
#include <stdlib.h>

#include "../base/config.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "../blocks/free_blocks.h"
#include "../blocks/map.h"
#include "../blocks/trace.h"
#include "../blocks/use.h"
#include "../order/capture.h"
#include "../order/record.h"
#include "../pools/pool.h"
#include "../stats/stat.h"
#include "checkpoint.h"

/* ---- what putting it back takes --------------------------------------------- */

typedef struct restore {
  pool_t *pool;
  const esper_checkpoint *checkpoint;
  size_t live_now, live_then; /* blocks */
  size_t blocks, uses;        /* upper bounds of the metadata needed */
  esper_checkpoint_delta *delta;
} restore_t;

static segment_t *segment_of(const restore_t *r, const chain_t *chain)
{
  segment_t *s = map_find_segment(r->pool->device->core->map, chain->address);
  return s && s->heap->pool == r->pool && s->address == chain->address && s->size == chain->size &&
                 s->sequence == chain->sequence
             ? s
             : NULL;
}

/* Whether there are pages under everything that was live. */
static bool has_memory(const restore_t *r, const chain_t *chain, const segment_t *segment)
{
  const block_t *first = segment->first;
  uintptr_t at = chain->address;
  for (size_t k = 0; k < chain->count; k++) {
    const part_t *part = &r->checkpoint->parts[chain->first + k];
    while (first->next && first->address + first->size <= at)
      first = first->next;
    at += part->size;
    for (const block_t *b = first; part->live && b && b->address < at; b = b->next)
      if (!block_is_mapped(b))
        return false;
  }
  return true;
}

static esper_status find_segments(const restore_t *r)
{
  for (size_t i = 0; i < r->checkpoint->chain_count; i++) {
    const chain_t *chain = &r->checkpoint->chains[i];
    const segment_t *segment = segment_of(r, chain);
    if (!segment || !has_memory(r, chain, segment))
      return error_set(ESPER_INVALID,
                       "the pool's segment of %zu bytes at %p was given back after the "
                       "checkpoint was taken: keep the pool while you need its checkpoints",
                       chain->size, (void *)chain->address);
  }
  return ESPER_OK;
}

static size_t use_count(const block_t *block)
{
  size_t count = 0;
  for (const use_t *use = block->uses; use; use = use->next)
    count++;
  return count;
}

/* Counts the blocks and uses that cutting takes: for each missing boundary one block, and a copy of
 * the uses of the block that is cut there. */
static void count_cuts(restore_t *r, const chain_t *chain)
{
  const block_t *b = segment_of(r, chain)->first;
  uintptr_t at = chain->address;
  for (size_t k = 0; k < chain->count; k++) {
    const part_t *part = &r->checkpoint->parts[chain->first + k];
    r->live_then += part->live;
    r->uses += part->live; /* for a borrower's use */
    at += part->size;
    while (b->next && b->address + b->size <= at)
      b = b->next;
    if (block_is_mapped(b) && at > b->address && at < b->address + b->size) {
      r->blocks++;
      r->uses += use_count(b);
    }
  }
}

/* Does everything that can fail, before anything changes. */
static esper_status find_and_reserve(restore_t *r)
{
  device_t *device = r->pool->device;
  esper_status status = find_segments(r);
  if (status != ESPER_OK)
    return status;
  for (const segment_t *s = device->first_segment; s; s = s->next)
    for (const block_t *b = s->first; b && s->heap->pool == r->pool; b = b->next)
      r->live_now += b->state == BLOCK_LIVE;
  for (size_t i = 0; i < r->checkpoint->chain_count; i++)
    count_cuts(r, &r->checkpoint->chains[i]);
  void **pointers = malloc((r->live_now + r->live_then + 1) * sizeof *pointers);
  if (!pointers || !arena_reserve(&device->blocks, r->blocks) ||
      !arena_reserve(&device->uses, r->uses)) {
    free(pointers);
    return checkpoint_no_host_memory();
  }
  *r->delta = (esper_checkpoint_delta){.freed = pointers, .live = pointers + r->live_now};
  return ESPER_OK;
}

/* ---- putting it back -------------------------------------------------------- */

/* Takes a block out of use, as if it were freed if it was live, but puts it into no bin. Where in a
 * capture this happens is unknown, so a block of a capture waits until its pool is quiesced. */
static void take_back(const restore_t *r, block_t *block)
{
  device_t *device = r->pool->device;
  const heap_t *home = block->segment->heap;
  if (block->state == BLOCK_LIVE) {
    r->delta->freed[r->delta->freed_count++] = (void *)block->address;
    cache_claim_live(block, block->address);
    if (block->oversize)
      stat_sub(&device->stats.oversize_allocations, 1);
    trace_add_memory(device, ESPER_TRACE_FREE_REQUESTED, block->address, block->requested,
                     block_user(block));
    owner_order_stamp(block);
    block->withheld =
        (home->quiesced || home->capture || block->capture) && RULE(QUIESCE_BEFORE_REUSE);
  } else {
    free_blocks_claim(block);
  }
  block_count_inactive(block);
  if (!RULE(CHECKPOINT_KEEPS_USES))
    uses_drop(device, block);
}

/* Cuts a block. Both halves owe what the whole owed, because no stream has waited for it. */
static void cut(device_t *device, block_t *block, size_t size)
{
  block_t *rest = block_split(device, block, size);
  rest->withheld = block->withheld;
  use_t **link = &block->uses;
  for (const use_t *use = rest->uses; use; use = use->next) {
    use_t *copy = use_take(device);
    *copy = *use;
    copy->next = NULL;
    if (copy->record)
      record_keep(copy->record);
    if (copy->point.branch)
      branch_keep(copy->point.branch);
    *link = copy;
    link = &copy->next;
  }
}

static void cut_at_boundaries(const restore_t *r, const chain_t *chain, segment_t *segment)
{
  block_t *block = segment->first;
  uintptr_t at = segment->address;
  for (size_t k = 0; k < chain->count; k++) {
    at += r->checkpoint->parts[chain->first + k].size;
    while (block->next && block->address + block->size <= at)
      block = block->next;
    if (block_is_mapped(block) && at > block->address && at < block->address + block->size)
      cut(r->pool->device, block, at - block->address);
  }
}

/* The free that ended these uses is taken back, so they last until the next one. */
static void prolong_uses(device_t *device, block_t *block)
{
  for (use_t **link = &block->uses, *use; (use = *link);) {
    if (!(use->flags & USE_AT_FREE && !use_is_loan(use)) || use_is_held(use)) {
      link = &use->next;
      continue;
    }
    *link = use->next;
    use_set_record(use, NULL);
    use_set_point(use, (capture_point_t){0});
    (void)use_attach(block, use->stream, NULL, use->flags, &use);
    if (use)
      use_give(device, use);
  }
}

static void hand_out_again(const restore_t *r, block_t *block, const part_t *part)
{
  device_t *device = r->pool->device;
  stream_t *home = block->segment->heap->stream;
  block->requested = part->requested;
  block_set_user(block, part->user);
  block->capture = part->capture;
  block->withheld = false;
  block_set_state(block, BLOCK_LIVE);
  block->counted_active = true;
  block->oversize = config_is_oversize(config_of(device->core), block->size);
  block->plain = part->user == home && !part->capture && !block->oversize;
  for (use_t *use = block->uses; use; use = use->next)
    use->stamp = 0; /* the next free will have its own stamp */
  prolong_uses(device, block);
  if (part->user != home && RULE(LOAN_MAKES_USE)) {
    use_t *use = use_take(device);
    (void)use_attach(block, loan_stream(part->user), NULL, USE_BY_LOAN, &use);
    if (use)
      use_give(device, use);
  }
  cache_count_allocated(block);
  trace_add_memory(device, ESPER_TRACE_ALLOC, block->address, part->requested, part->user);
  r->delta->live[r->delta->live_count++] = (void *)block->address;
}

/* A use by record_stream lasts until the free, and the restore is that free. Such a use is held. */
static void put_back(block_t *block)
{
  for (use_t *use = block->uses; use; use = use->next)
    if (use_ends_at_free(use) && !use_has_number(use) && !use->point.branch)
      use_hold(use);
  free_blocks_add(block);
}

/* Restores one part from the claimed pieces between `block` and `end`. Returns the first piece
 * after them. */
static block_t *restore_part(const restore_t *r, block_t *block, uintptr_t end, const part_t *part)
{
  while (block && block->address < end) {
    while (part->live && block->size < part->size) {
      block->withheld |= block->next->withheld;
      block_merge_next(r->pool->device, block);
    }
    block_t *next = block->next; /* the block may merge with the one before it */
    if (part->live)
      hand_out_again(r, block, part);
    else if (block_is_mapped(block))
      put_back(block);
    block = next;
  }
  return block;
}

/* `chain` NULL: the segment is newer than the checkpoint, so all of it becomes free. */
static void restore_segment(const restore_t *r, segment_t *segment, const chain_t *chain)
{
  static const part_t free_part = {.live = false};
  if (!chain) {
    restore_part(r, segment->first, segment->address + segment->size, &free_part);
    return;
  }
  cut_at_boundaries(r, chain, segment);
  block_t *block = segment->first;
  uintptr_t at = segment->address;
  for (size_t k = 0; k < chain->count; k++) {
    const part_t *part = &r->checkpoint->parts[chain->first + k];
    at += part->size;
    block = restore_part(r, block, at, part);
  }
}

static const chain_t *chain_of(const restore_t *r, const segment_t *segment)
{
  for (size_t i = 0; i < r->checkpoint->chain_count; i++)
    if (r->checkpoint->chains[i].address == segment->address)
      return &r->checkpoint->chains[i];
  return NULL;
}

static esper_status restore_pool(restore_t *r)
{
  if (r->pool->open)
    return error_set(ESPER_INVALID,
                     "allocations go to pool (%llu, %llu): end that before restoring its "
                     "checkpoint",
                     (unsigned long long)r->pool->id[0], (unsigned long long)r->pool->id[1]);
  for (const segment_t *s = r->pool->device->first_segment; s; s = s->next)
    if (s->heap->pool == r->pool && s->asleep)
      return error_set(ESPER_ASLEEP, "memory of pool (%llu, %llu) sleeps: wake it first",
                       (unsigned long long)r->pool->id[0], (unsigned long long)r->pool->id[1]);
  esper_status status = find_and_reserve(r);
  if (status != ESPER_OK)
    return status;
  /* All of it first, so that no peak counts what was live as well as what is live again. */
  for (segment_t *s = r->pool->device->first_segment; s; s = s->next)
    for (block_t *b = s->first; b && s->heap->pool == r->pool; b = b->next)
      if (block_is_mapped(b))
        take_back(r, b);
  for (segment_t *s = r->pool->device->first_segment; s; s = s->next)
    if (s->heap->pool == r->pool)
      restore_segment(r, s, chain_of(r, s));
  return ESPER_OK;
}

esper_status esper_checkpoint_restore(esper_core *core, const esper_checkpoint *checkpoint,
                                      esper_checkpoint_delta *delta)
{
  *delta = (esper_checkpoint_delta){0};
  if (checkpoint->core != core->serial)
    return error_set(ESPER_INVALID,
                     "the checkpoint was taken by another allocator: restore it there");
  device_t *device = &core->devices[checkpoint->device];
  restore_t r = {.checkpoint = checkpoint, .delta = delta};
  r.pool = checkpoint_lock_pool(device, checkpoint->id);
  esper_status status = r.pool ? restore_pool(&r) : checkpoint_no_pool(device, checkpoint->id);
  if (r.pool)
    unlock(&device->lock);
  return status;
}
