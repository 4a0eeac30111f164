/* pool_flags.c: what a pool's owner says of it. */
#include "pool.h"

#include "../api/core.h"
#include "../base/error.h"

bool pool_has_graphs(const pool_t *pool)
{
  bool has = pool->checkpointed;
  for (const heap_t *heap = pool->heaps; heap && !has; heap = heap->next)
    has = heap->capture != 0;
  for (const segment_t *s = pool->device->first_segment; s && !has; s = s->next)
    has = s->heap->pool == pool && s->captured;
  return has;
}

pool_t *pool_next_spare(device_t *device, pool_t *pool)
{
  lock(&device->lock);
  pool_t *next = pool ? pool->next : device->pools;
  while (next && (!next->use_on_oom || (pool_has_graphs(next) && RULE(GRAPHS_KEEP_MEMORY))))
    next = next->next;
  if (next)
    pool_enter(next);
  if (pool) {
    pool_leave(pool);
    pool_collect(device);
  }
  unlock(&device->lock);
  pool_bury(device);
  return next;
}

/* ---- the public interface ------------------------------------------------- */

esper_status esper_pool_set_flags(esper_core *core, int index, uint64_t first, uint64_t second,
                                  unsigned which, unsigned flags)
{
  device_t *device;
  esper_status status = core_device(core, index, &device);
  if (status != ESPER_OK)
    return status;
  if (which & ~(ESPER_POOL_USE_ON_OOM | ESPER_POOL_NO_SPLIT))
    return error_set(ESPER_INVALID,
                     "pool flags %#x: there are ESPER_POOL_USE_ON_OOM and "
                     "ESPER_POOL_NO_SPLIT",
                     which);
  lock(&device->lock);
  pool_t *pool = first || second ? pool_find(device, first, second) : NULL;
  if (pool && which & ESPER_POOL_USE_ON_OOM)
    pool->use_on_oom = flags & ESPER_POOL_USE_ON_OOM;
  if (pool && which & ESPER_POOL_NO_SPLIT)
    pool->no_split = flags & ESPER_POOL_NO_SPLIT;
  if (!pool && flags & which) /* nothing to take back is no mistake */
    status = error_set(ESPER_INVALID, "device %d has no pool (%llu, %llu) to set flags of", index,
                       (unsigned long long)first, (unsigned long long)second);
  unlock(&device->lock);
  return status;
}
