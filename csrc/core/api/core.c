#include "core.h"

#include <stdlib.h>
#include <time.h>

#include "../base/call.h"
#include "../base/config.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../blocks/block_cache.h"
#include "../blocks/find.h"
#include "../blocks/map.h"
#include "../blocks/trace.h"
#include "../memory/mapped.h"
#include "../memory/orphan.h"
#include "../memory/peers.h"
#include "../memory/segment.h"
#include "../memory/shared.h"
#include "../memory/slack.h"
#include "../order/capture.h"
#include "../order/device.h"
#include "../order/event.h"
#include "../order/stream.h"
#include "../order/wait_log.h"
#include "../pools/pool.h"
#include "../pools/routing.h"
#include "../pools/source.h"
#include "../requests/drain.h"
#include "../requests/heap.h"
#include "../requests/imports.h"
#include "../requests/record_use.h"
#include "../stats/pool_stats.h"
#include "../stats/stat_shard.h"
#include "../stats/stats.h"

/* ---- devices ----------------------------------------------------------- */

static void device_init(core_t *core, int index)
{
  device_t *device = &core->devices[index];
  device->core = core;
  device->index = index;
  device->fraction = 1;
  device->limit = SIZE_MAX;
  peers_init(device);
  arena_init(&device->blocks, sizeof(block_t));
  arena_init(&device->segments, sizeof(segment_t));
  arena_init(&device->uses, sizeof(use_t));
  arena_init(&device->records, sizeof(record_t));
  arena_init(&device->loose_pages, sizeof(loose_t));
  pool_init(&device->default_pool, device, 0, 0);
}

static void device_destroy(device_t *device)
{
  core_t *core = device->core;
  fronts_close(device);
  gates_forget(device);
  shared_forget(device, true);
  imports_destroy(device);
  for (segment_t *s = device->first_segment; s; s = s->next) {
    for (block_t *b = s->first; b; b = b->next)
      while (b->uses) {
        use_t *use = b->uses;
        b->uses = use->next;
        if (use->record)
          record_drop(use->record);
        place_drop(&use->place);
      }
    if (s->pages)
      mapped_destroy(s);
    else
      source_give_back(s->heap->pool, s->address, s->size);
  }
  loose_give_back(device);
  for (pool_t *pool = device->pools, *next; pool; pool = next) {
    next = pool->next;
    device->pools = next; /* its allocator may ask for pools when it goes */
    pool_destroy_heaps(pool);
    source_drop(pool);
    if (pool != &device->default_pool)
      free(pool);
  }
  accounts_destroy(device);
  for (int i = 0; i < 2; i++)
    if (atomic_load(&device->carriers[i]))
      call_stream_destroy(core, device->index, atomic_load(&device->carriers[i])->handle);
  for (opening_t *o = device->openings, *older; o; o = older) {
    older = o->older;
    opening_discard(o);
  }
  for (heap_t *heap = device->spare_heaps, *next; heap; heap = next) {
    next = heap->next;
    free(heap);
  }
  trace_destroy(&device->trace);
}

static void device_destroy_rest(device_t *device)
{
  event_destroy_all(device);
  core_assert(!device->events_alive || device->core->shut_down);
  arena_destroy(&device->blocks);
  arena_destroy(&device->segments);
  arena_destroy(&device->uses);
  arena_destroy(&device->records);
  arena_destroy(&device->loose_pages);
  peers_destroy(device);
}

/* ---- life -------------------------------------------------------------- */

static int64_t monotonic_us(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000;
}

esper_status esper_core_create(const esper_driver *driver, const esper_config *config,
                               esper_core **core)
{
  *core = NULL;
  core_t *c = host_take(sizeof *c);
  if (!c)
    return error_set(ESPER_HOST_MEMORY, "no host memory for the allocator");
  static _Atomic uint64_t serials;
  c->driver = driver;
  c->clock_us = monotonic_us;
  c->serial = atomic_fetch_add(&serials, 1) + 1;
  esper_status status = driver->device_count(driver->self, &c->device_count);
  if (status != ESPER_OK)
    error_from_driver(c, status);
  else
    status = config_set(c, config);
  if (status == ESPER_OK) {
    c->map = map_create();
    c->devices = host_take(((size_t)c->device_count + 1) * sizeof *c->devices);
    if (!c->map || !c->devices)
      status = error_set(ESPER_HOST_MEMORY, "no host memory for the allocator");
  }
  if (status != ESPER_OK) {
    map_destroy(c->map);
    config_destroy_all(c);
    free(c->devices);
    free(c);
    return status;
  }
  for (int i = 0; i < c->device_count; i++)
    device_init(c, i);
  *core = c;
  return ESPER_OK;
}

void core_set_clock(core_t *core, int64_t (*clock_us)(void))
{
  core->clock_us = clock_us;
}

void core_set_pages_moved(core_t *core, uint64_t pages)
{
  for (int d = 0; d < core->device_count; d++)
    core->devices[d].counters.pages_moved = pages;
}

void esper_core_destroy(esper_core *core)
{
  if (!core)
    return;
  for (int i = 0; i < core->device_count; i++)
    device_destroy(&core->devices[i]);
  stream_destroy_all(core);
  for (int i = 0; i < core->device_count; i++)
    device_destroy_rest(&core->devices[i]);
  map_destroy(core->map);
  config_destroy_all(core);
  free(core->devices);
  free(core);
}

int esper_device_count(const esper_core *core)
{
  return core->device_count;
}

esper_status esper_stream_set_traits(esper_core *core, esper_stream stream, unsigned traits)
{
  device_t *device;
  presented_t p;
  if (traits & ~ESPER_TRAIT_RENDEZVOUS)
    return error_set(ESPER_INVALID, "stream traits %#x: give 0 or ESPER_TRAIT_RENDEZVOUS", traits);
  esper_status status = core_device(core, stream.device, &device);
  if (status == ESPER_OK)
    status = stream_present(core, stream, &p);
  if (status == ESPER_OK)
    stream_set_traits(p.stream, traits);
  return status;
}

esper_status esper_configure(esper_core *core, const esper_config *config)
{
  esper_status status = config_set(core, config);
  for (int i = 0; status == ESPER_OK && i < core->device_count; i++) {
    device_t *device = &core->devices[i];
    lock(&device->lock);
    fronts_close(device); /* how they serve depends on it */
    unlock(&device->lock);
  }
  return status;
}

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
    return error_set(ESPER_INVALID,
                     "device %d is no peer of its own: it always has access to "
                     "its memory",
                     device);
  return peers_add(&core->devices[device], peer);
}

void esper_get_config(const esper_core *core, esper_config *config)
{
  *config = config_of(core)->as_given;
}

/* ---- memory ------------------------------------------------------------ */

static esper_status malloc_entered(pool_t *pool, size_t size, esper_stream stream, void **ptr)
{
  device_t *device = pool->device;
  esper_status status = heap_malloc(pool, size, stream, (front_try_t){0}, ptr);
  lock(&device->lock);
  pool_leave(pool);
  unlock(&device->lock);
  return status;
}

static esper_status malloc_default(device_t *device, size_t size, esper_stream stream, void **ptr)
{
  front_try_t try;
  if (!size)
    return ESPER_OK;
  if (front_malloc(device->core, stream, size, &try, ptr))
    return ESPER_OK;
  return heap_malloc(&device->default_pool, size, stream, try, ptr);
}

esper_status esper_malloc(esper_core *core, size_t size, esper_stream stream, void **ptr)
{
  device_t *device;
  *ptr = NULL;
  esper_status status = core_device(core, stream.device, &device);
  if (status != ESPER_OK)
    return status;
  if (!atomic_load_explicit(&device->opening_count, memory_order_acquire))
    return malloc_default(device, size, stream, ptr);
  pool_t *pool;
  status = opening_choose(device, stream.handle, &pool);
  return status == ESPER_OK ? malloc_entered(pool, size, stream, ptr) : status;
}

esper_status esper_malloc_from(esper_core *core, esper_pool *pool, size_t size, esper_stream stream,
                               void **ptr)
{
  *ptr = NULL;
  if (pool->device->core != core || pool->device->index != stream.device)
    return error_set(ESPER_INVALID, "the pool belongs to device %d, the stream to device %d",
                     pool->device->index, stream.device);
  lock(&pool->device->lock);
  pool_enter(pool);
  unlock(&pool->device->lock);
  return malloc_entered(pool, size, stream, ptr);
}

esper_status esper_free(esper_core *core, void *ptr)
{
  return heap_free(core, ptr);
}

esper_status esper_record_use(esper_core *core, const void *const *ptrs, size_t count,
                              esper_stream stream, unsigned flags, size_t *marked)
{
  device_t *device;
  esper_status status = core_device(core, stream.device, &device);
  return status == ESPER_OK ? marks_record_use(core, ptrs, count, stream, flags, marked) : status;
}

esper_status esper_record_use_event(esper_core *core, const void *const *ptrs, size_t count,
                                    void *event, int device_index, unsigned flags, size_t *marked)
{
  device_t *device;
  esper_status status = core_device(core, device_index, &device);
  return status == ESPER_OK
             ? marks_record_use_event(core, ptrs, count, event, device_index, flags, marked)
             : status;
}

esper_status esper_record_stream(esper_core *core, const void *ptr, esper_stream stream)
{
  device_t *device;
  esper_status status = core_device(core, stream.device, &device);
  return status == ESPER_OK ? marks_record_stream(core, ptr, stream) : status;
}

esper_status esper_free_after_all(esper_core *core, void *ptr)
{
  return marks_free_after_all(core, ptr);
}

void esper_retire(esper_core *core, int device)
{
  if (device >= 0 && device < core->device_count && atomic_load(&core->devices[device].ready))
    heap_retire(&core->devices[device]);
}

/* What blocks, uses and events needed that have gone goes, too. */
static void trim_metadata(device_t *device)
{
  for (stream_t *s = atomic_load(&device->core->streams); s; s = s->next)
    if (s->device == device)
      stream_give_spares(s);
  records_trim(device);
  lock(&device->lock);
  arena_trim(&device->blocks);
  unlock(&device->lock); /* others are let in between */
  lock(&device->lock);
  arena_trim(&device->uses);
  unlock(&device->lock);
  map_shrink(device->core->map);
}

esper_status esper_empty_cache(esper_core *core, int device_index, esper_pool *pool)
{
  device_t *device;
  esper_status status = core_used_device(core, device_index, &device);
  if (!device)
    return status;
  status = settle_device(device);
  lock(&device->lock);
  device->stats.num_sync_all_streams++;
  unlock(&device->lock);
  imports_reap(device, true);
  heap_release(device, pool, true, SIZE_MAX);
  trim_metadata(device);
  /* During a capture what has completed was given back, and that is all. */
  return status == ESPER_CAPTURING ? ESPER_OK : status;
}

/* ---- limits and figures ------------------------------------------------ */

esper_status esper_set_memory_fraction(esper_core *core, int device_index, double fraction)
{
  device_t *device;
  if (!(fraction >= 0 && fraction <= 1))
    return error_set(ESPER_INVALID, "memory fraction %g: give at least 0 and at most 1", fraction);
  lock(&core->config_lock); /* it may be about to be used */
  esper_status status = core_used_device(core, device_index, &device);
  if (status == ESPER_OK && device) {
    status = device_set_limit(device, fraction);
  } else if (status == ESPER_OK) {
    device = &core->devices[device_index];
    lock(&device->lock);
    device->fraction = fraction; /* its limit comes with its first use */
    unlock(&device->lock);
  }
  unlock(&core->config_lock);
  return status;
}

double esper_get_memory_fraction(const esper_core *core, int device_index)
{
  if (device_index < 0 || device_index >= core->device_count)
    return 1;
  device_t *device = &core->devices[device_index];
  lock(&device->lock);
  double fraction = device->fraction;
  unlock(&device->lock);
  return fraction;
}

esper_status esper_get_stats(esper_core *core, int device_index, esper_stats *stats)
{
  device_t *device;
  *stats = (esper_stats){0};
  esper_status status = core_used_device(core, device_index, &device);
  if (status != ESPER_OK)
    return status;
  if (device) {
    heap_retire(device);
    lock(&device->lock);
    fronts_pause(device);
    ledgers_read(device);
    *stats = device->stats;
    ledgers_grant(device, NULL);
    fronts_resume(device);
    unlock(&device->lock);
  }
  size_t max_split = config_of(core)->max_split_size;
  stats->max_split_size = max_split == SIZE_MAX ? -1 : (int64_t)max_split;
  return ESPER_OK;
}

esper_status esper_reset_peak_stats(esper_core *core, int device_index)
{
  device_t *device;
  esper_status status = core_used_device(core, device_index, &device);
  if (!device)
    return status;
  heap_retire(device);
  lock(&device->lock);
  fronts_pause(device);
  ledgers_read(device);
  stats_reset_peaks(&device->stats);
  accounts_reset_peaks(device);
  fronts_resume(device);
  unlock(&device->lock);
  return ESPER_OK;
}

esper_status esper_reset_accumulated_stats(esper_core *core, int device_index)
{
  device_t *device;
  esper_status status = core_used_device(core, device_index, &device);
  if (!device)
    return status;
  lock(&device->lock);
  fronts_pause(device);
  ledgers_read(device);
  stats_reset_accumulated(&device->stats);
  accounts_reset_accumulated(device);
  ledgers_grant(device, NULL);
  fronts_resume(device);
  unlock(&device->lock);
  return ESPER_OK;
}

static void count_pending(const heap_t *heap, esper_counters *counters)
{
  for (const block_t *b = heap->oldest_pending; b; b = b->newer) {
    bool held = false;
    for (const use_t *use = b->uses; use; use = use->next)
      held |= !use->record && !use->place.branch;
    counters->bytes_pending += b->size;
    counters->blocks_held += held;
  }
}

esper_status esper_get_counters(esper_core *core, int device_index, esper_counters *counters)
{
  device_t *device;
  *counters = (esper_counters){0};
  esper_status status = core_used_device(core, device_index, &device);
  if (!device)
    return status;
  heap_retire(device);
  lock(&device->lock);
  *counters = device->counters;
  for (const pool_t *pool = device->pools; pool; pool = pool->next)
    for (const heap_t *heap = pool->heaps; heap; heap = heap->next)
      count_pending(heap, counters);
  counters->uses_pending = device->uses.live;
  counters->bytes_loose = device->loose_bytes;
  counters->metadata_bytes = arena_used_bytes(&device->blocks) +
                             arena_used_bytes(&device->segments) + arena_used_bytes(&device->uses) +
                             map_bytes(core->map);
  unlock(&device->lock);
  lock(&device->events_lock);
  counters->metadata_bytes += arena_used_bytes(&device->records);
  counters->events_alive = device->events_alive;
  counters->events_created = device->events_created;
  unlock(&device->events_lock);
  return ESPER_OK;
}

esper_status esper_gates_copy(esper_core *core, int device_index, esper_gate_entry **entries,
                              size_t *count)
{
  device_t *device;
  *entries = NULL;
  *count = 0;
  esper_status status = core_used_device(core, device_index, &device);
  return device ? gates_copy(device, entries, count) : status;
}

esper_status esper_memory_info(esper_core *core, int device_index, size_t *free, size_t *total)
{
  device_t *device;
  esper_status status = core_device(core, device_index, &device);
  if (status == ESPER_OK) {
    status = call_memory_info(core, device_index, free, total);
    if (status != ESPER_OK)
      error_from_driver(core, status);
  }
  return status;
}

static size_t largest_cached(const device_t *device)
{
  size_t largest = 0;
  for (const pool_t *pool = device->pools; pool; pool = pool->next)
    for (const heap_t *heap = pool->heaps; heap; heap = heap->next)
      for (int large = 0; large < 2; large++) {
        const block_t *block = bins_largest(&heap->ready[large]);
        if (block && block->size > largest)
          largest = block->size;
      }
  return largest;
}

esper_status esper_largest_available(esper_core *core, int device_index, size_t *bytes)
{
  size_t free = 0, total = 0;
  *bytes = 0;
  esper_status status = esper_memory_info(core, device_index, &free, &total);
  if (status != ESPER_OK)
    return status;
  device_t *device = &core->devices[device_index];
  heap_retire(device);
  lock(&device->lock);
  size_t reserved = (size_t)device->stats.reserved_bytes[ESPER_ALL].current;
  size_t allowed = reserved < device->limit ? device->limit - reserved : 0;
  if (free > allowed)
    free = allowed;
  fronts_close(device);
  size_t cached = largest_cached(device);
  *bytes = cached > free ? cached : free;
  unlock(&device->lock);
  return ESPER_OK;
}

esper_status esper_find_block(esper_core *core, const void *ptr, esper_block_info *info)
{
  *info = (esper_block_info){0};
  block_t *block = marks_lock_block(core, ptr);
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
      .stream = block_user(block)->handle,
      .segment_address = (void *)block->segment->address,
      .segment_size = block->segment->size,
      .mapped = block->segment->pages != NULL,
  };
  unlock(&device->lock);
  return ESPER_OK;
}

esper_status esper_find_base(esper_core *core, const void *ptr, void **address, size_t *size)
{
  const block_t *block = marks_lock_block(core, ptr);
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

/* ---- checking ---------------------------------------------------------- */

/* Live, pending and ready bytes of the blocks against the statistics. */
static bool figures_are_valid(device_t *device)
{
  int64_t reserved = 0, allocated = 0, active = 0, split = 0, segments = 0;
  for (const segment_t *s = device->first_segment; s; s = s->next) {
    reserved += (int64_t)s->bytes;
    for (const block_t *b = s->first; b; b = b->next) {
      segments += block_is_mapped(b) && !(b->prev && block_is_mapped(b->prev));
      if (b->state == BLOCK_LIVE)
        allocated += (int64_t)b->size;
      if (b->counted_active)
        active += (int64_t)b->size;
      if ((b->state == BLOCK_READY || b->state == BLOCK_PENDING) && block_counts_as_split(b))
        split += (int64_t)b->size;
    }
  }
  const esper_stats *stats = &device->stats;
  return segments == stats->segment[ESPER_ALL].current &&
         reserved == stats->reserved_bytes[ESPER_ALL].current &&
         allocated == stats->allocated_bytes[ESPER_ALL].current &&
         active == stats->active_bytes[ESPER_ALL].current &&
         split == stats->inactive_split_bytes[ESPER_ALL].current;
}

static bool device_is_valid(device_t *device)
{
  bool valid = true;
  lock(&device->lock);
  for (pool_t *pool = device->pools; pool && valid; pool = pool->next)
    for (heap_t *heap = pool->heaps; heap && valid; heap = heap->next)
      valid = front_is_valid(heap);
  fronts_close(device);
  valid = valid && ledgers_are_valid(device);
  ledgers_read(device);
  for (segment_t *s = device->first_segment; s && valid; s = s->next)
    valid = segment_is_valid(s);
  for (pool_t *pool = device->pools; pool && valid; pool = pool->next)
    valid = pool_is_valid(pool);
  valid = valid && figures_are_valid(device) && gates_are_valid(device) && room_is_valid(device) &&
          loose_is_valid(device) && accounts_are_valid(device);
  valid = valid && arena_is_valid(&device->blocks) && arena_is_valid(&device->segments) &&
          arena_is_valid(&device->uses);
  unlock(&device->lock);
  return valid && records_are_valid(device);
}

int esper_core_is_valid(esper_core *core)
{
  bool valid = map_is_valid(core->map);
  for (int i = 0; i < core->device_count && valid; i++)
    valid = device_is_valid(&core->devices[i]);
  for (stream_t *s = atomic_load(&core->streams); s && valid; s = s->next)
    valid = stream_is_valid(s);
  valid = valid && capture_is_valid(core);
  return valid;
}

const char *esper_driver_call_name(int call)
{
  static const char *const names[] = {
#define CALL_NAME(name, parameters, arguments) #name,
      ESPER_DRIVER_FUNCTIONS(CALL_NAME)
#undef CALL_NAME
  };
  return call >= 0 && call < CALL_COUNT ? names[call] : NULL;
}

uint64_t esper_driver_calls(const esper_core *core, int call)
{
  if (call < 0 || call >= CALL_COUNT)
    return 0;
  uint64_t calls = atomic_load_explicit(&core->driver_calls[call], memory_order_relaxed);
  for (int i = 0; call == CALL_stream_capture && i < core->device_count; i++)
    calls += fronts_questions(&core->devices[i]);
  return calls;
}
