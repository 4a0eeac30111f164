#include "segment.h"

#include "../base/config.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/find.h"
#include "../blocks/free_blocks.h"
#include "../blocks/map.h"
#include "../blocks/trace.h"
#include "../pools/source.h"
#include "../stats/stats.h"
#include "failure.h"

void segment_link(segment_t *segment)
{
  device_t *device = segment->device;
  segment->prev = device->last_segment;
  segment->next = NULL;
  *(segment->prev ? &segment->prev->next : &device->first_segment) = segment;
  device->last_segment = segment;
}

void segment_unlink(segment_t *segment)
{
  device_t *device = segment->device;
  *(segment->prev ? &segment->prev->next : &device->first_segment) = segment->next;
  *(segment->next ? &segment->next->prev : &device->last_segment) = segment->prev;
}

static segment_size_t size_of(const segment_t *segment)
{
  return (segment_size_t){segment->size, segment->large, segment->oversize};
}

block_t *segment_make(heap_t *heap, size_t size, bool large)
{
  device_t *device = heap->device;
  segment_t *segment = arena_take(&device->segments);
  block_t *block = segment ? block_make(device, segment, 0, size) : NULL;
  if (!block || !map_reserve_segment(device->core->map)) {
    if (block)
      block_discard(device, block);
    if (segment)
      arena_give(&device->segments, segment);
    return NULL;
  }
  *segment = (segment_t){.size = size,
                         .bytes = size,
                         .device = device,
                         .heap = heap,
                         .large = large,
                         .oversize = config_is_oversize(config_of(device->core), size),
                         .first = block};
  return block;
}

void segment_discard(device_t *device, block_t *block)
{
  map_unreserve_segment(device->core->map);
  if (block->next)
    block_discard(device, block->next);
  arena_give(&device->segments, block->segment);
  block_discard(device, block);
}

void segment_add(block_t *block, uintptr_t address)
{
  segment_t *segment = block->segment;
  device_t *device = segment->device;
  segment->address = address;
  segment->sequence = device->next_sequence++;
  for (block_t *b = segment->first; b; address += b->size, b = b->next)
    __atomic_store_n(&b->address, address, __ATOMIC_RELAXED);
  map_insert_reserved(device->core->map, segment);
  map_insert(device->core->map, block);
  segment_link(segment);
  stats_segment_added(&device->stats, segment->heap->pool->reserved_bytes, size_of(segment));
  trace_add_memory(device, ESPER_TRACE_SEGMENT_ALLOC, segment->address, segment->size,
                   segment->heap->stream);
}

static size_t reserved_with(const device_t *device, size_t size)
{
  return (size_t)device->stats.reserved_bytes[ESPER_ALL].current + device->reserving + size;
}

static bool passes_share(const device_t *device, size_t reserved)
{
  double share = config_of(device->core)->as_given.rejection_share;
  return share > 0 && reserved > (size_t)(share * (double)device->total);
}

bool segment_may_come(const device_t *device, size_t size)
{
  size_t then = reserved_with(device, size);
  return then <= device->limit && !passes_share(device, then);
}

esper_status segment_check_limits(const device_t *device, size_t size)
{
  size_t then = reserved_with(device, size);
  double share = config_of(device->core)->as_given.rejection_share;
  if (size && then > device->limit)
    return error_set(ESPER_OUT_OF_MEMORY, "the memory fraction allows %zu bytes on device %d",
                     device->limit, device->index);
  if (size && passes_share(device, then))
    return error_set(ESPER_REJECTED, "%zu bytes more would exceed %g%% of the memory of device %d",
                     size, share * 100, device->index);
  return ESPER_OK;
}

esper_status segment_obtain(heap_t *heap, size_t size, bool large, block_t **block)
{
  device_t *device = heap->device;
  bool drivers = !heap->pool->source.obtain;
  *block = NULL;
  lock(&device->lock);
  esper_status status = segment_check_limits(device, size);
  block_t *whole = status == ESPER_OK ? segment_make(heap, size, large) : NULL;
  if (status == ESPER_OK && !whole)
    status = error_set(ESPER_HOST_MEMORY, "no host memory for a segment");
  if (whole && !drivers)
    device->reserving += size;
  unlock(&device->lock);
  if (!whole)
    return status;

  uintptr_t address = 0;
  status = source_obtain(heap->pool, size, &address);

  lock(&device->lock);
  if (!drivers)
    device->reserving -= size;
  else if (status == ESPER_OUT_OF_MEMORY)
    device->refused = size;
  else if (status == ESPER_OK && size >= device->refused)
    device->refused = 0;
  if (status == ESPER_OK)
    segment_add(*block = whole, address);
  else
    segment_discard(device, whole);
  unlock(&device->lock);
  return status;
}

void segment_leaves(device_t *device, block_t *block)
{
  segment_t *segment = block->segment;
  trace_add_memory(device, ESPER_TRACE_SEGMENT_FREE, segment->address, segment->size,
                   segment->heap->stream); /* while its pool can still be found */
  map_remove_segment(device->core->map, segment);
  map_remove(device->core->map, block);
  segment_unlink(segment);
  stats_segment_removed(&device->stats, segment->heap->pool->reserved_bytes, size_of(segment));
}

void segment_release(device_t *device, block_t *block)
{
  /* Out of the map and lists first: the driver may hand the address to another thread before its
   * function returns. */
  lock(&device->lock);
  segment_leaves(device, block);
  unlock(&device->lock);
  const segment_t *segment = block->segment;
  failure_note(device, source_give_back(segment->heap->pool, segment->address, segment->size));
  lock(&device->lock);
  device->refused = 0;
  segment_discard(device, block);
  unlock(&device->lock);
}

esper_status segment_pin(core_t *core, const void *ptr, void **address)
{
  block_t *block = find_lock_live(core, ptr);
  if (!block)
    return error_set(ESPER_INVALID, "%p is in no live block of this allocator", ptr);
  segment_t *segment = block->segment;
  bool pinned = segment->pinned = !segment->asleep;
  if (pinned && address)
    *address = (void *)segment->address;
  unlock(&segment->device->lock);
  return pinned
             ? ESPER_OK
             : error_set(ESPER_ASLEEP, "memory around %p sleeps: wake it before it is pinned", ptr);
}

static bool has_live_blocks(const segment_t *segment)
{
  for (const block_t *b = segment->first; b; b = b->next)
    if (b->state == BLOCK_LIVE)
      return true;
  return false;
}

/* Looks the segment up again by its address, because it may have gone unless it is pinned. */
static segment_t *find_pinned(device_t *device, uintptr_t address)
{
  for (segment_t *s = device->first_segment; s; s = s->next)
    if (s->address == address)
      return s->pinned ? s : NULL;
  return NULL;
}

esper_status segment_unpin(core_t *core, void *address)
{
  for (int i = 0; i < core->device_count; i++) {
    device_t *device = &core->devices[i];
    lock(&device->lock);
    caches_close(device);
    segment_t *segment = find_pinned(device, (uintptr_t)address);
    bool live = segment && has_live_blocks(segment);
    if (segment && !live)
      segment->pinned = false;
    unlock(&device->lock);
    if (live)
      return error_set(ESPER_NOT_READY, "the segment at %p still has live memory: free that first",
                       address);
    if (segment)
      return ESPER_OK;
  }
  return error_set(ESPER_INVALID, "no pinned segment begins at %p", address);
}

void segment_move(segment_t *segment, heap_t *heap)
{
  __atomic_store_n(&segment->heap, heap, __ATOMIC_RELEASE);
}
