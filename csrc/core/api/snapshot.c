/* snapshot.c: takes a consistent picture of a device: esper_report.h has its structures, pending
 * uses among them. docs/uses.md explains PyTorch's snapshot (torch/reporting/snapshot.cpp). */
#include <stdlib.h>

#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/use.h"
#include "../memory/page_table.h"
#include "../order/device.h"
#include "../pools/pool.h"

typedef struct counts {
  size_t segments, blocks, uses;
} counts_t;

/* In a mapped segment each stretch with memory appears as a segment of its own. */
static bool begins_stretch(const block_t *block)
{
  return block_is_mapped(block) && !(block->prev && block_is_mapped(block->prev));
}

static counts_t count(const device_t *device)
{
  counts_t counts = {0};
  for (const segment_t *s = device->first_segment; s; s = s->next) {
    for (const block_t *b = s->first; b; b = b->next) {
      counts.segments += begins_stretch(b);
      counts.blocks++;
      for (const use_t *use = b->uses; use; use = use->next)
        counts.uses++;
    }
  }
  return counts;
}

/* Enlarges an array to `count` elements. If that fails, *enough_memory becomes false, and the array
 * stays as it is. */
static void *grow(void *array, size_t count, size_t element, bool *enough_memory)
{
  void *grown = realloc(array, (count + 1) * element);
  *enough_memory &= grown != NULL;
  return grown ? grown : array;
}

static bool reserve(esper_snapshot *s, counts_t more)
{
  bool enough_memory = true;
  s->segments =
      grow(s->segments, s->segment_count + more.segments, sizeof *s->segments, &enough_memory);
  s->blocks = grow(s->blocks, s->block_count + more.blocks, sizeof *s->blocks, &enough_memory);
  s->uses = grow(s->uses, s->use_count + more.uses, sizeof *s->uses, &enough_memory);
  return enough_memory;
}

static esper_use_entry use_entry(const block_t *block, const use_t *use)
{
  bool captured = use->point.branch != NULL;
  bool held = use_is_held(use) && (block->state != BLOCK_LIVE || !use_ends_at_free(use));
  return (esper_use_entry){
      .device = use->stream->device->index,
      .stream = use->stream->handle,
      .number = use_number(use),
      .kind = (use->flags & USE_AT_FREE ? ESPER_ENTRY_AT_FREE : 0u) |
              (held ? ESPER_ENTRY_HELD : 0u) | (captured ? ESPER_ENTRY_CAPTURED : 0u),
  };
}

static esper_block_entry block_entry(const block_t *block, esper_snapshot *snapshot)
{
  esper_block_entry entry = {
      .address = block->address,
      .size = block->size,
      .requested = block->counted_active ? block->requested : 0,
      .state = block->state == BLOCK_LIVE ? ESPER_BLOCK_ALLOCATED
               : block->counted_active    ? ESPER_BLOCK_PENDING_FREE
                                          : ESPER_BLOCK_INACTIVE,
      .stream = block->user ? block_user(block)->handle : NULL,
      .first_use = snapshot->use_count,
  };
  /* The thread that claimed a block may be changing its uses. */
  for (const use_t *use = block->uses; use && block->state != BLOCK_CLAIMED; use = use->next)
    if (!use_has_completed(use))
      snapshot->uses[snapshot->use_count++] = use_entry(block, use);
  entry.uses = (unsigned)(snapshot->use_count - entry.first_use);
  return entry;
}

static void add_stretch(const block_t *first, esper_snapshot *snapshot)
{
  const segment_t *s = first->segment;
  const heap_t *heap = s->heap;
  esper_segment_entry *entry = &snapshot->segments[snapshot->segment_count++];
  *entry = (esper_segment_entry){
      .address = first->address,
      .device = s->device->index,
      .large = s->large,
      .mapped = s->pages != NULL,
      .stream = heap->stream->handle,
      .pool = {heap->pool->id[0], heap->pool->id[1]},
      .birth = s->sequence,
      .tag = tag_name(heap->tag),
      .first_block = snapshot->block_count,
  };
  for (const block_t *b = first; b && block_is_mapped(b); b = b->next) {
    snapshot->blocks[snapshot->block_count++] = block_entry(b, snapshot);
    entry->size += b->size;
  }
  entry->block_count = snapshot->block_count - entry->first_block;
  for (size_t at = 0; s->absent && at < entry->size; at += s->device->granule)
    entry->asleep += page_at(s, entry->address + at)->absent ? s->device->granule : 0;
}

static void add_device(const device_t *device, esper_snapshot *snapshot)
{
  for (const segment_t *s = device->first_segment; s; s = s->next)
    for (const block_t *b = s->first; b; b = b->next)
      if (begins_stretch(b))
        add_stretch(b, snapshot);
}

static int by_address(const void *a, const void *b)
{
  uintptr_t x = ((const esper_segment_entry *)a)->address;
  uintptr_t y = ((const esper_segment_entry *)b)->address;
  return (x > y) - (x < y);
}

esper_status esper_snapshot_take(esper_core *core, int device, esper_snapshot *snapshot)
{
  *snapshot = (esper_snapshot){0};
  for (int i = 0; i < core->device_count; i++) {
    if (device >= 0 && i != device)
      continue;
    device_t *d = &core->devices[i];
    if (!atomic_load(&d->ready))
      continue;
    pools_retire(d);
    lock(&d->lock);
    caches_close(d);
    bool enough_memory = reserve(snapshot, count(d));
    if (enough_memory)
      add_device(d, snapshot);
    unlock(&d->lock);
    if (!enough_memory) {
      esper_snapshot_free(snapshot);
      return error_set(ESPER_HOST_MEMORY, "no host memory for a snapshot");
    }
  }
  if (snapshot->segment_count)
    qsort(snapshot->segments, snapshot->segment_count, sizeof *snapshot->segments, by_address);
  return ESPER_OK;
}

void esper_snapshot_free(esper_snapshot *snapshot)
{
  free(snapshot->segments);
  free(snapshot->blocks);
  free(snapshot->uses);
  *snapshot = (esper_snapshot){0};
}

void esper_record(esper_core *core, const esper_recorder *recorder)
{
  atomic_store_explicit(&core->recorder, recorder, memory_order_release);
}

void esper_trace_watch(esper_core *core, esper_trace_watch_fn *watch, void *context)
{
  for (int i = 0; i < core->device_count; i++) {
    device_t *d = &core->devices[i];
    lock(&d->lock);
    caches_close(d);
    d->watch = watch;
    d->watch_context = context;
    unlock(&d->lock);
  }
}
