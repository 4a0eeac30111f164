#include "routing.h"

#include <sched.h>
#include <stdlib.h>

#include "../base/error.h"
#include "pool.h"

esper_status route_make(esper_pool_filter *filter, void *context, route_t **route)
{
  if (!(*route = calloc(1, sizeof **route)))
    return error_set(ESPER_HOST_MEMORY, "no host memory for a pool's filter");
  (*route)->filter = filter;
  (*route)->context = context;
  return ESPER_OK;
}

void route_discard(route_t *route)
{
  free(route);
}

void route_wait(route_t *route)
{
  while (atomic_load(&route->callers))
    sched_yield();
}

void route_reserve(device_t *device)
{
  atomic_fetch_add(&device->route_count, 1);
  atomic_fetch_add(&device->core->captures_likely, 1);
}

void route_add(device_t *device, pool_t *pool, route_t *route)
{
  route->pool = pool;
  route->older = device->routes;
  device->routes = route;
}

route_t *route_remove(device_t *device, const pool_t *pool)
{
  route_t **link = &device->routes;
  while (*link && (*link)->pool != pool)
    link = &(*link)->older;
  route_t *route = *link;
  if (route) {
    *link = route->older;
    route->removed = true;
    atomic_fetch_sub(&device->route_count, 1);
    atomic_fetch_sub(&device->core->captures_likely, 1);
  }
  return route;
}

/* A caller of a route's filter keeps the route, but not those behind it. If the route was removed
 * meanwhile, all are asked again. */
esper_status route_choose(device_t *device, void *stream, pool_t **pool)
{
  int answer = 0;
  *pool = device->default_pool;
  lock(&device->lock);
  for (route_t *o = device->routes, *next; o && !answer; o = next) {
    atomic_fetch_add(&o->callers, 1);
    unlock(&device->lock);
    answer = o->filter(o->context, stream);
    lock(&device->lock);
    next = o->removed ? device->routes : o->older;
    if (answer)
      pool_enter(*pool = o->pool);
    atomic_fetch_sub(&o->callers, 1);
  }
  if (!answer)
    pool_enter(*pool);
  unlock(&device->lock);
  if (answer >= 0)
    return ESPER_OK;
  unsigned long long first = (*pool)->id[0], second = (*pool)->id[1];
  lock(&device->lock);
  pool_leave(*pool); /* then the pool may be gone */
  unlock(&device->lock);
  return error_set(ESPER_INVALID, "the filter of pool (%llu, %llu) failed", first, second);
}
