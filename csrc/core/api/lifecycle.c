/* lifecycle.c: makes, configures and destroys a core. */
#include <stdlib.h>
#include <time.h>

#include "../base/call.h"
#include "../base/config.h"
#include "../base/core_assert.h"
#include "../base/error.h"
#include "../blocks/free_blocks.h"
#include "../blocks/map.h"
#include "../blocks/use.h"
#include "../memory/fence.h"
#include "../memory/mapped.h"
#include "../memory/peers.h"
#include "../memory/shared.h"
#include "../order/device.h"
#include "../order/event.h"
#include "../order/stream.h"
#include "../pools/pool.h"
#include "../pools/routing.h"
#include "../pools/source.h"
#include "../requests/drain.h"
#include "../requests/imports.h"

/* ---- devices ----------------------------------------------------------- */

static void device_init(core_t *core, int index)
{
  device_t *device = &core->devices[index];
  device->core = core;
  device->index = index;
  mutex_init(&device->sleep_lock, LOCK_SLEEP);
  mutex_init(&device->sending_lock, LOCK_SENDING);
  mutex_init(&device->sync_lock, LOCK_SYNC);
  mutex_init(&device->growth_lock, LOCK_GROWTH);
  mutex_init(&device->lock, LOCK_DEVICE);
  mutex_init(&device->events_lock, LOCK_LEAF);
  device->fraction = 1;
  device->limit = SIZE_MAX;
  arena_init(&device->blocks, sizeof(block_t));
  arena_init(&device->segments, sizeof(segment_t));
  arena_init(&device->uses, sizeof(use_t));
  arena_init(&device->records, sizeof(record_t));
  device->default_pool = &core->default_pools[index];
  pool_init(device->default_pool, device, 0, 0);
}

static void device_destroy(device_t *device)
{
  core_t *core = device->core;
  caches_close(device);
  shared_forget(device, true);
  if (device->forget_sleeping)
    device->forget_sleeping(device);
  if (device->copier)
    call_stream_destroy(core, device->index, device->copier->handle);
  imports_destroy(device);
  for (segment_t *s = device->first_segment; s; s = s->next) {
    for (block_t *b = s->first; b; b = b->next)
      uses_drop(device, b);
    if (s->pages)
      mapped_destroy(s);
    else if (s->fenced)
      fence_lower(s);
    else
      source_give_back(s->heap->pool, s->address, s->size);
  }
  fences_destroy(device);
  for (pool_t *pool = device->pools, *next; pool; pool = next) {
    next = pool->next;
    device->pools = next; /* its allocator's `drop` may look for pools */
    pool_destroy_heaps(pool);
    source_drop(pool);
    if (pool != device->default_pool)
      free(pool);
  }
  if (atomic_load(&device->carrier))
    call_stream_destroy(core, device->index, atomic_load(&device->carrier)->handle);
  for (route_t *o = device->routes, *older; o; o = older) {
    older = o->older;
    route_discard(o);
  }
  for (heap_t *heap = device->spare_heaps, *next; heap; heap = next) {
    next = heap->next;
    free(heap);
  }
}

static void device_destroy_rest(device_t *device)
{
  event_destroy_all(device);
  core_assert(!device->events_alive || core_is(device->core, CORE_SHUT_DOWN));
  arena_destroy(&device->blocks);
  arena_destroy(&device->segments);
  arena_destroy(&device->uses);
  arena_destroy(&device->records);
  peers_destroy(device);
}

/* ---- life -------------------------------------------------------------- */

esper_status esper_core_create(const esper_driver *driver, const esper_config *config,
                               esper_core **core)
{
  *core = NULL;
  core_t *c = host_take(sizeof *c);
  if (!c)
    return error_set(ESPER_HOST_MEMORY, "no host memory for the allocator");
  mutex_init(&c->config_lock, LOCK_CONFIG);
  mutex_init(&c->streams_lock, LOCK_LEAF);
  mutex_init(&c->captures_lock, LOCK_LEAF);
  static _Atomic uint64_t serials;
  c->driver = driver;
  c->serial = atomic_fetch_add(&serials, 1) + 1;
  esper_status status = driver->device_count(driver->self, &c->device_count);
  if (status != ESPER_OK)
    error_from_driver(c, status);
  else
    status = config_set(c, config);
  if (status == ESPER_OK) {
    c->map = map_create();
    c->devices = host_take(((size_t)c->device_count + 1) * sizeof *c->devices);
    c->default_pools = calloc((size_t)c->device_count + 1, sizeof *c->default_pools);
    if (!c->map || !c->devices || !c->default_pools)
      status = error_set(ESPER_HOST_MEMORY, "no host memory for the allocator");
  }
  if (status != ESPER_OK) {
    map_destroy(c->map);
    config_destroy_all(c);
    free(c->default_pools);
    free(c->devices);
    free(c);
    return status;
  }
  for (int i = 0; i < c->device_count; i++)
    device_init(c, i);
  *core = c;
  return ESPER_OK;
}

void esper_core_destroy(esper_core *core)
{
  if (!core)
    return;
  for (int i = 0; i < core->device_count; i++)
    if (atomic_load(&core->devices[i].ready))
      drain_device(&core->devices[i], DRAIN_LIMITED); /* work of one may use memory of another */
  for (int i = 0; i < core->device_count; i++)
    device_destroy(&core->devices[i]);
  stream_destroy_all(core);
  for (int i = 0; i < core->device_count; i++)
    device_destroy_rest(&core->devices[i]);
  map_destroy(core->map);
  config_destroy_all(core);
  free(core->default_pools);
  free(core->devices);
  free(core);
}

int esper_device_count(const esper_core *core)
{
  return core->device_count;
}

esper_status esper_configure(esper_core *core, const esper_config *config)
{
  esper_status status = config_set(core, config);
  for (int i = 0; status == ESPER_OK && i < core->device_count; i++) {
    device_t *device = &core->devices[i];
    lock(&device->lock);
    caches_close(device); /* how they serve depends on the configuration */
    for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
      heap->allowance_doubled = 0;
    unlock(&device->lock);
  }
  return status;
}

void esper_get_config(const esper_core *core, esper_config *config)
{
  *config = config_of(core)->as_given;
}
