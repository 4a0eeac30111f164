#include "routing.h"

#include <sched.h>
#include <stdlib.h>

#include "../base/config.h"
#include "../api/core.h"
#include "../base/error.h"
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

bool opening_may_capture(const device_t *device)
{
  return config_of(device->core)->as_given.captures_are_announced ? device->captures_announced > 0
                                                                  : device->openings != NULL;
}

bool opening_may_capture_now(device_t *device)
{
  lock(&device->lock);
  bool may = opening_may_capture(device);
  unlock(&device->lock);
  return may;
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
  *pool = &device->default_pool;
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

/* ---- the public interface ------------------------------------------------ */

esper_status esper_capture_begin(esper_core *core, int index)
{
  device_t *device;
  esper_status status = core_device(core, index, &device);
  if (status != ESPER_OK)
    return status;
  lock(&device->lock);
  device->captures_announced++;
  unlock(&device->lock);
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
  unlock(&device->lock);
  return known ? ESPER_OK
               : error_set(ESPER_INVALID,
                           "no capture was announced that goes on on device %d: it was not "
                           "begun, or has ended",
                           index);
}
