/* memory.c: the public functions that allocate, mark and free memory, and look at it. */
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "../blocks/find.h"
#include "../blocks/map.h"
#include "../memory/fence.h"
#include "../memory/mapped.h"
#include "../memory/peers.h"
#include "../memory/segment.h"
#include "../memory/shared.h"
#include "../order/device.h"
#include "../order/record.h"
#include "../pools/pool.h"
#include "../pools/routing.h"
#include "../requests/drain.h"
#include "../requests/free.h"
#include "../requests/imports.h"
#include "../requests/malloc.h"
#include "../requests/note_use.h"
#include "../requests/record_use.h"
#include "../requests/release.h"

static esper_status malloc_entered(pool_t *pool, size_t size, esper_stream stream, void **ptr)
{
  device_t *device = pool->device;
  esper_status status = malloc_block(pool, size, stream, (cache_attempt_t){0}, ptr);
  lock(&device->lock);
  pool_leave(pool);
  unlock(&device->lock);
  return status;
}

static esper_status malloc_default(device_t *device, size_t size, esper_stream stream, void **ptr)
{
  cache_attempt_t attempt;
  if (!size || cache_malloc(device->core, stream, size, &attempt, ptr))
    return ESPER_OK;
  return malloc_block(device->default_pool, size, stream, attempt, ptr);
}

static inline const esper_recorder *recorder_of(const core_t *core)
{
  return atomic_load_explicit(&core->recorder, memory_order_acquire);
}

/* After a malloc. */
static esper_status record_malloc(const core_t *core, esper_status status, size_t size,
                                  esper_stream stream, void *const *ptr)
{
  const esper_recorder *recorder = recorder_of(core);
  if (recorder && status == ESPER_OK && *ptr)
    recorder->allocated(*ptr, size, stream);
  return status;
}

/* After a mark. */
static void record_marks(core_t *core, esper_status status, const void *const *ptrs, size_t count,
                         esper_stream stream)
{
  const esper_recorder *recorder = recorder_of(core);
  for (size_t i = 0; recorder && status == ESPER_OK && i < count; i++)
    recorder->used(ptrs[i], stream);
}

static inline esper_status malloc_routed(esper_core *core, size_t size, esper_stream stream,
                                         void **ptr)
{
  device_t *device;
  *ptr = NULL;
  esper_status status = core_device(core, stream.device, &device);
  if (status != ESPER_OK)
    return status;
  if (!atomic_load_explicit(&device->route_count, memory_order_acquire))
    return malloc_default(device, size, stream, ptr);
  pool_t *pool;
  status = route_choose(device, stream.handle, &pool);
  return status == ESPER_OK ? malloc_entered(pool, size, stream, ptr) : status;
}

/* Apart, so that a malloc that nobody records keeps nothing for this. */
__attribute__((noinline)) static esper_status malloc_recorded(esper_core *core, size_t size,
                                                              esper_stream stream, void **ptr)
{
  return record_malloc(core, malloc_routed(core, size, stream, ptr), size, stream, ptr);
}

esper_status esper_malloc(esper_core *core, size_t size, esper_stream stream, void **ptr)
{
  return recorder_of(core) ? malloc_recorded(core, size, stream, ptr)
                           : malloc_routed(core, size, stream, ptr);
}

esper_status esper_malloc_from(esper_core *core, esper_pool *pool, size_t size, esper_stream stream,
                               void **ptr)
{
  *ptr = NULL;
  if (pool->device->core != core || pool->device->index != stream.device)
    return error_set(ESPER_INVALID,
                     "the pool belongs to device %d and the stream to device %d: use a stream of "
                     "the pool's device",
                     pool->device->index, stream.device);
  lock(&pool->device->lock);
  pool_enter(pool);
  unlock(&pool->device->lock);
  return record_malloc(core, malloc_entered(pool, size, stream, ptr), size, stream, ptr);
}

__attribute__((noinline)) static esper_status free_recorded(esper_core *core, void *ptr)
{
  const esper_recorder *recorder = recorder_of(core);
  if (recorder && ptr)
    recorder->freed(ptr);
  return free_block(core, ptr);
}

esper_status esper_free(esper_core *core, void *ptr)
{
  return recorder_of(core) ? free_recorded(core, ptr) : free_block(core, ptr);
}

esper_status esper_record_use(esper_core *core, const void *const *ptrs, size_t count,
                              esper_stream stream, unsigned flags, size_t *marked)
{
  device_t *device;
  if (flags & ~ESPER_USE_UNTIL_FREE)
    return error_set(ESPER_INVALID, "flags of a use are %#x: use 0 or ESPER_USE_UNTIL_FREE", flags);
  esper_status status = core_device(core, stream.device, &device);
  if (status != ESPER_OK)
    return status;
  status = mark_use(core, ptrs, count, stream, flags, marked);
  record_marks(core, status, ptrs, count, stream);
  return status;
}

esper_status esper_record_use_event(esper_core *core, const void *const *ptrs, size_t count,
                                    void *event, int device_index, size_t *marked)
{
  device_t *device;
  esper_status status = core_device(core, device_index, &device);
  if (status != ESPER_OK)
    return status;
  status = mark_use_event(core, ptrs, count, event, device_index, marked);
  record_marks(core, status, ptrs, count, (esper_stream){.device = device_index});
  return status;
}

esper_status esper_record_stream(esper_core *core, const void *ptr, esper_stream stream)
{
  device_t *device;
  esper_status status = core_device(core, stream.device, &device);
  if (status != ESPER_OK)
    return status;
  status = mark_stream(core, ptr, stream);
  record_marks(core, status, &ptr, 1, stream);
  return status;
}

esper_status esper_note_use(esper_core *core, const void *const *ptrs, size_t count,
                            esper_stream stream)
{
  device_t *device;
  esper_status status = core_device(core, stream.device, &device);
  return status == ESPER_OK ? note_uses(core, ptrs, count, stream) : status;
}

esper_status esper_note_unseen_uses(esper_core *core)
{
  return note_unseen_uses(core);
}

esper_status esper_free_after_all(esper_core *core, void *ptr)
{
  return mark_until_all_done(core, ptr);
}

void esper_retire(esper_core *core, int device)
{
  if (device >= 0 && device < core->device_count && atomic_load(&core->devices[device].ready))
    pools_retire(&core->devices[device]);
}

/* The caller has entered the pool (NULL: all pools), which this leaves again. */
static esper_status empty_cache(device_t *device, pool_t *pool)
{
  esper_status status = drain_device(device, DRAIN_GENTLY | DRAIN_LIMITED);
  lock(&device->lock);
  device->stats.num_sync_all_streams++;
  unlock(&device->lock);
  imports_reap(device);
  release_cached(device, pool, true, SIZE_MAX);
  if (pool) {
    lock(&device->lock);
    pool_leave(pool);
    pool_collect(device);
    unlock(&device->lock);
    pool_bury(device);
  }
  /* Then only memory whose uses had completed could go: no error. */
  return status == ESPER_CAPTURING || status == ESPER_NOT_READY ? ESPER_OK : status;
}

esper_status esper_empty_cache(esper_core *core, int device_index, esper_pool *pool)
{
  device_t *device;
  esper_status status = core_used_device(core, device_index, &device);
  if (status == ESPER_OK && pool && (pool->device->core != core || pool->device != device))
    return error_set(ESPER_INVALID,
                     "the pool belongs to device %d, and the cache of device %d is to be emptied: "
                     "name the pool's device",
                     pool->device->index, device_index);
  if (!device)
    return status;
  if (pool) {
    lock(&device->lock);
    pool_enter(pool);
    unlock(&device->lock);
  }
  return empty_cache(device, pool);
}

esper_status esper_pool_empty(esper_core *core, int index, uint64_t first, uint64_t second)
{
  device_t *device;
  esper_status status = core_used_device(core, index, &device);
  if (!device)
    return status;
  lock(&device->lock);
  pool_t *pool = pool_find(device, first, second);
  if (pool)
    pool_enter(pool);
  unlock(&device->lock);
  return pool ? empty_cache(device, pool) : ESPER_OK;
}

esper_status esper_fence(esper_core *core, int on)
{
  for (int i = 0; on && i < core->device_count; i++) {
    device_t *device = &core->devices[i];
    if (atomic_load(&device->ready) && !mapped_granule(device))
      return error_set(
          ESPER_UNSUPPORTED,
          "device %d cannot map pages, so its memory gets no fence: use a device and a "
          "driver with virtual memory management",
          i);
  }
  if (on)
    atomic_fetch_or(&core->modes, CORE_FENCED);
  else
    atomic_fetch_and(&core->modes, ~(unsigned)CORE_FENCED);
  return ESPER_OK;
}

uint64_t esper_fence_rounds(esper_core *core)
{
  uint64_t most = 0;
  for (int i = 0; i < core->device_count; i++) {
    device_t *device = &core->devices[i];
    lock(&device->lock);
    uint64_t rounds = fence_rounds(device);
    unlock(&device->lock);
    most = rounds > most ? rounds : most;
  }
  return most;
}

/* ---- looking at memory ---------------------------------------------------- */

esper_status esper_find_block(esper_core *core, const void *ptr, esper_block_info *info)
{
  *info = (esper_block_info){0};
  block_t *block = find_lock_live(core, ptr);
  if (!block)
    return error_set(ESPER_INVALID, "%p is in no live block of this allocator", ptr);
  device_t *device = block->segment->device;
  const pool_t *pool = block->segment->heap->pool;
  *info = (esper_block_info){
      .address = (void *)block->address,
      .size = block->size,
      .requested = block->requested,
      .device = device->index,
      .live = 1,
      .pool = {pool->id[0], pool->id[1]},
      .asleep = pages_sleep_under(block),
      .stream = block_user(block)->handle,
      .segment_address = (void *)block->segment->address,
      .segment_size = block->segment->size,
      .mapped = block->segment->pages != NULL,
      .fenced = block->segment->fenced,
  };
  unlock(&device->lock);
  return ESPER_OK;
}

esper_status esper_find_base(esper_core *core, const void *ptr, void **address, size_t *size)
{
  const block_t *block = find_lock_live(core, ptr);
  if (!block)
    return error_set(ESPER_INVALID, "%p is in no live block of this allocator", ptr);
  device_t *device = block->segment->device;
  const block_t *first = block, *last = block;
  while (first->prev && block_is_mapped(first->prev))
    first = first->prev;
  while (last->next && block_is_mapped(last->next))
    last = last->next;
  *address = (void *)first->address;
  *size = last->address + last->size - first->address;
  unlock(&device->lock);
  return ESPER_OK;
}

esper_status esper_pin(esper_core *core, const void *ptr, void **segment)
{
  return segment_pin(core, ptr, segment);
}

esper_status esper_unpin(esper_core *core, void *segment)
{
  return segment_unpin(core, segment);
}

/* ---- other processes, other devices --------------------------------------- */

esper_status esper_share(esper_core *core, const void *ptr, void **address, esper_page_name **pages,
                         size_t *count)
{
  return shared_name(core, ptr, address, pages, count);
}

size_t esper_unshare(esper_core *core)
{
  size_t forgotten = 0;
  for (int i = 0; i < core->device_count; i++)
    forgotten += shared_forget(&core->devices[i], false);
  return forgotten;
}

esper_status esper_open_shared(esper_core *core, int device_index, const esper_page_name *pages,
                               size_t count, void **address)
{
  device_t *device;
  *address = NULL;
  esper_status status = core_device(core, device_index, &device);
  return status == ESPER_OK ? imports_open(device, pages, count, address) : status;
}

esper_status esper_close_shared(esper_core *core, void *address)
{
  return imports_close(core, address);
}

esper_status esper_add_peer(esper_core *core, int device, int peer)
{
  int wrong = device < 0 || device >= core->device_count ? device : peer;
  if (wrong < 0 || wrong >= core->device_count)
    return core_no_device(core, wrong);
  if (device == peer)
    return error_set(
        ESPER_INVALID,
        "device %d cannot be its own peer: it always has access to its memory, so leave "
        "this call out",
        device);
  return peers_add(&core->devices[device], peer);
}
