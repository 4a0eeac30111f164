#include "routing.h"

#include <sched.h>
#include <stdlib.h>

#include "../base/config.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "pool.h"

esper_status opening_make(esper_pool_filter *filter, void *context, opening_t **opening)
{
  if (!(*opening = calloc(1, sizeof **opening)))
    return error_set(ESPER_HOST_MEMORY, "no host memory for a pool's filter");
  (*opening)->filter = filter;
  (*opening)->context = context;
  return ESPER_OK;
}

void opening_discard(opening_t *opening)
{
  free(opening);
}

void opening_wait(opening_t *opening)
{
  while (atomic_load(&opening->callers))
    sched_yield();
}

bool opening_has_room(const device_t *device)
{
  return atomic_load(&device->opening_count) < OPENINGS;
}

void opening_reserve(device_t *device)
{
  atomic_fetch_add(&device->opening_count, 1);
}

void opening_add(device_t *device, pool_t *pool, opening_t *opening)
{
  opening->pool = pool;
  opening->older = device->openings;
  device->openings = opening;
}

opening_t *opening_remove(device_t *device, const pool_t *pool)
{
  opening_t **link = &device->openings;
  while (*link && (*link)->pool != pool)
    link = &(*link)->older;
  opening_t *opening = *link;
  if (opening) {
    *link = opening->older;
    atomic_fetch_sub(&device->opening_count, 1);
  }
  return opening;
}

esper_status opening_choose(device_t *device, void *stream, pool_t **pool)
{
  opening_t *asked[OPENINGS];
  int count = 0, answer = 0;
  lock(&device->lock);
  for (opening_t *o = device->openings; o; o = o->older) {
    atomic_fetch_add(&o->callers, 1);
    asked[count++] = o;
  }
  unlock(&device->lock);
  *pool = device->default_pool;
  for (int i = 0; i < count && !answer; i++)
    if ((answer = asked[i]->filter(asked[i]->context, stream)))
      *pool = asked[i]->pool;
  lock(&device->lock);
  pool_enter(*pool);
  unlock(&device->lock);
  for (int i = 0; i < count; i++)
    atomic_fetch_sub(&asked[i]->callers, 1);
  if (answer >= 0)
    return ESPER_OK;
  unsigned long long first = (*pool)->id[0], second = (*pool)->id[1];
  lock(&device->lock);
  pool_leave(*pool); /* and is gone, maybe */
  unlock(&device->lock);
  return error_set(ESPER_INVALID, "the filter of pool (%llu, %llu) failed", first, second);
}
