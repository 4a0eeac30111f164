#include "source.h"

#include "../base/call.h"
#include "../base/error.h"

_Thread_local unsigned embedder_callbacks;

static void give_back(const pool_t *pool, void *given, size_t size)
{
  embedder_callbacks++;
  pool->source.give_back(pool->source.context, pool->device->index, given, size);
  embedder_callbacks--;
}

static esper_status obtain_from(const pool_t *pool, size_t size, uintptr_t *address)
{
  void *given = NULL;
  embedder_callbacks++;
  esper_status status =
      pool->source.obtain(pool->source.context, pool->device->index, size, &given);
  embedder_callbacks--;
  if (status != ESPER_OK || !given)
    return error_set(status == ESPER_OK ? ESPER_OUT_OF_MEMORY : status,
                     "the allocator of pool (%llu, %llu) did not provide a segment of %zu bytes on "
                     "device %d",
                     (unsigned long long)pool->id[0], (unsigned long long)pool->id[1], size,
                     pool->device->index);
  if ((uintptr_t)given % BLOCK_ALIGN) {
    give_back(pool, given, size);
    return error_set(
        ESPER_INVALID,
        "the allocator of pool (%llu, %llu) provided memory at %p: its addresses must be "
        "multiples of %d",
        (unsigned long long)pool->id[0], (unsigned long long)pool->id[1], given, (int)BLOCK_ALIGN);
  }
  *address = (uintptr_t)given;
  return ESPER_OK;
}

esper_status source_obtain(const pool_t *pool, size_t size, uintptr_t *address)
{
  if (pool->source.obtain)
    return obtain_from(pool, size, address);
  core_t *core = pool->device->core;
  esper_status status = call_memory_alloc(core, pool->device->index, size, address);
  return status == ESPER_OK ? ESPER_OK : error_from_driver(core, status);
}

esper_status source_give_back(const pool_t *pool, uintptr_t address, size_t size)
{
  if (!pool->source.obtain)
    return call_memory_free(pool->device->core, pool->device->index, address);
  give_back(pool, (void *)address, size);
  return ESPER_OK;
}

void source_drop(pool_t *pool)
{
  embedder_callbacks++;
  if (pool->source.drop)
    pool->source.drop(pool->source.context);
  embedder_callbacks--;
}
