/* pools.c: the public functions of pools and captures. */
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../order/capturing.h"
#include "../order/device.h"
#include "../pools/pool.h"
#include "../pools/routing.h"
#include "../requests/quiesce.h"

static esper_status no_pool(device_t *device, uint64_t first, uint64_t second)
{
  return error_set(ESPER_INVALID, "device %d has no pool (%llu, %llu)", device->index,
                   (unsigned long long)first, (unsigned long long)second);
}

static esper_status no_host_memory(void)
{
  return error_set(ESPER_HOST_MEMORY, "no host memory for a pool");
}

static esper_status private_pool_device(core_t *core, int index, uint64_t first, uint64_t second,
                                        device_t **device)
{
  if (!first && !second)
    return error_set(ESPER_INVALID,
                     "pool (0, 0) is the default pool, which always exists: use another id");
  return core_device(core, index, device);
}

esper_status esper_pool_create(esper_core *core, int index, uint64_t first, uint64_t second,
                               esper_pool **pool)
{
  device_t *device;
  *pool = NULL;
  esper_status status = private_pool_device(core, index, first, second, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  bool created = !pool_find(device, first, second);
  *pool = pool_refer(device, first, second);
  if (*pool && created) /* growth reads it without the lock */
    (*pool)->created = true;
  unlock(&device->lock);
  return *pool ? ESPER_OK : no_host_memory();
}

/* Waits for a thread that is just recording an event for all streams, which would end a capture
 * that begins now. */
static void await_events_for_all(device_t *device)
{
  lock(&device->all_streams->lock);
  unlock(&device->all_streams->lock);
}

esper_status esper_pool_begin(esper_core *core, int index, uint64_t first, uint64_t second,
                              esper_pool_filter *filter, void *context)
{
  device_t *device;
  esper_status status = private_pool_device(core, index, first, second, &device);
  if (status != ESPER_OK)
    return status;
  if (!filter)
    return error_set(ESPER_INVALID,
                     "a pool is begun without a filter: pass the function that says which streams "
                     "allocate from it");
  route_t *route;
  status = route_make(filter, context, &route);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  pool_t *pool = pool_find(device, first, second);
  bool open = pool && pool->open;
  if (!open && (pool = pool_refer(device, first, second))) {
    pool->open = true;
    route_reserve(device);
  }
  unlock(&device->lock);
  if (open || !pool) {
    route_discard(route);
    if (open)
      return error_set(ESPER_INVALID,
                       "allocations already go to pool (%llu, %llu) of device %d: end that first",
                       (unsigned long long)first, (unsigned long long)second, index);
    return no_host_memory();
  }
  quiesce_pool(pool);
  lock(&device->lock);
  route_add(device, pool, route);
  unlock(&device->lock);
  await_events_for_all(device);
  return ESPER_OK;
}

esper_status esper_pool_end(esper_core *core, int index, uint64_t first, uint64_t second,
                            void **context)
{
  device_t *device;
  if (context)
    *context = NULL;
  esper_status status = private_pool_device(core, index, first, second, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  pool_t *pool = pool_find(device, first, second);
  route_t *route = pool ? route_remove(device, pool) : NULL;
  unlock(&device->lock);
  if (!route)
    return error_set(
        ESPER_INVALID,
        "allocations do not go to pool (%llu, %llu) of device %d: that was never begun, "
        "or has ended already",
        (unsigned long long)first, (unsigned long long)second, index);
  route_wait(route);
  if (context)
    *context = route->context;
  route_discard(route);
  lock(&device->lock);
  pool->open = false;
  pool_collect(device);
  bool last = !device->routes;
  unlock(&device->lock);
  if (last)
    stream_forget_captures(device);
  pool_bury(device);
  return ESPER_OK;
}

esper_status esper_pool_release(esper_core *core, int index, uint64_t first, uint64_t second)
{
  device_t *device;
  esper_status status = private_pool_device(core, index, first, second, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  pool_t *pool = pool_find(device, first, second);
  if (pool && pool->references)
    pool_let_go(pool);
  else
    status = no_pool(device, first, second);
  unlock(&device->lock);
  pool_bury(device);
  return status;
}

int esper_pool_use_count(esper_core *core, int index, uint64_t first, uint64_t second)
{
  if (index < 0 || index >= core->device_count)
    return 0;
  device_t *device = &core->devices[index];
  lock(&device->lock);
  /* The default pool has no references. */
  const pool_t *pool = first || second ? pool_find(device, first, second) : NULL;
  int references = pool ? pool->references : 0;
  unlock(&device->lock);
  return references;
}

esper_status esper_pool_set_flags(esper_core *core, int index, uint64_t first, uint64_t second,
                                  unsigned which, unsigned flags)
{
  device_t *device;
  esper_status status = core_device(core, index, &device);
  if (status != ESPER_OK)
    return status;
  if (which & ~(ESPER_POOL_USE_ON_OOM | ESPER_POOL_NO_SPLIT))
    return error_set(ESPER_INVALID,
                     "pool flags are %#x: use ESPER_POOL_USE_ON_OOM and ESPER_POOL_NO_SPLIT only",
                     which);
  lock(&device->lock);
  pool_t *pool = first || second ? pool_find(device, first, second) : NULL;
  if (pool && which & ESPER_POOL_USE_ON_OOM)
    pool->use_on_oom = flags & ESPER_POOL_USE_ON_OOM;
  if (pool && which & ESPER_POOL_NO_SPLIT)
    pool->no_split = flags & ESPER_POOL_NO_SPLIT;
  if (!pool && flags & which) /* clearing flags of a missing pool is no error */
    status = error_set(ESPER_INVALID,
                       "device %d has no pool (%llu, %llu): make it before setting its flags",
                       index, (unsigned long long)first, (unsigned long long)second);
  unlock(&device->lock);
  return status;
}

esper_status esper_pool_set_source(esper_core *core, int index, uint64_t first, uint64_t second,
                                   const esper_source *source)
{
  device_t *device;
  esper_status status = core_device(core, index, &device);
  if (status != ESPER_OK)
    return status;
  if (!source->obtain || !source->give_back)
    return error_set(ESPER_INVALID,
                     "a pool's allocator has no obtain or no give_back function: set both");
  lock(&device->lock);
  pool_t *pool = first || second ? pool_find(device, first, second) : NULL;
  bool free_to_choose =
      pool && pool->references && !pool->busy && !pool->source.obtain && !pool_has_memory(pool);
  if (free_to_choose)
    pool->source = *source;
  unlock(&device->lock);
  return free_to_choose
             ? ESPER_OK
             : error_set(
                   ESPER_INVALID,
                   "pool (%llu, %llu) of device %d does not exist, or already has memory or an "
                   "allocator: set the allocator right after making the pool",
                   (unsigned long long)first, (unsigned long long)second, index);
}

/* ---- captures ------------------------------------------------------------ */

esper_status esper_capture_begin(esper_core *core, int index)
{
  device_t *device;
  esper_status status = core_device(core, index, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  device->captures_announced++;
  atomic_fetch_add(&core->captures_likely, 1);
  unlock(&device->lock);
  await_events_for_all(device);
  return ESPER_OK;
}

esper_status esper_capture_end(esper_core *core, int index)
{
  device_t *device;
  esper_status status = core_device(core, index, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  bool known = device->captures_announced > 0;
  device->captures_announced -= known;
  atomic_fetch_sub(&core->captures_likely, known);
  bool last = !device->captures_announced && !device->routes;
  unlock(&device->lock);
  if (last)
    stream_forget_captures(device);
  return known
             ? ESPER_OK
             : error_set(ESPER_INVALID,
                         "esper_capture_end: no announced capture is going on on device %d: it was "
                         "never begun, or has ended already",
                         index);
}

/* ---- statistics ---------------------------------------------------------- */

static bool has_stats(const pool_t *pool)
{
  static const esper_stat none[ESPER_CLASSES];
  return pool != pool->device->default_pool && memcmp(pool->reserved_bytes, none, sizeof none) != 0;
}

static size_t count_stats(const device_t *device)
{
  size_t count = 0;
  for (const pool_t *pool = device->pools; pool; pool = pool->next)
    count += has_stats(pool);
  return count;
}

/* The list begins with the youngest pool; the copy begins with the oldest. */
static void copy_stats(const device_t *device, esper_pool_stats *to, size_t count)
{
  for (const pool_t *pool = device->pools; pool; pool = pool->next)
    if (has_stats(pool)) {
      to[--count] = (esper_pool_stats){.id = {pool->id[0], pool->id[1]}};
      memcpy(to[count].reserved_bytes, pool->reserved_bytes, sizeof pool->reserved_bytes);
    }
}

esper_status esper_get_pool_stats(esper_core *core, int index, esper_pool_stats **pools,
                                  size_t *count)
{
  device_t *device;
  *pools = NULL;
  *count = 0;
  esper_status status = core_used_device(core, index, &device);
  if (!device)
    return status;
  lock(&device->lock);
  *count = count_stats(device);
  *pools = *count ? malloc(*count * sizeof **pools) : NULL;
  if (*pools)
    copy_stats(device, *pools, *count);
  unlock(&device->lock);
  if (*count && !*pools) {
    *count = 0;
    return error_set(ESPER_HOST_MEMORY, "no host memory for the statistics of pools");
  }
  return ESPER_OK;
}
