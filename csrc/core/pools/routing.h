/* routing.h: which pool serves a malloc. A pool that was begun and not ended
 * has an route; its filter says which mallocs the pool serves. Under the
 * device's lock unless said otherwise. */
#ifndef ESPER_ROUTING_H
#define ESPER_ROUTING_H

#include "../base/types.h"

/* A pool that allocations go to now, if its filter says so. */
struct route {
  pool_t *pool;
  esper_pool_filter *filter;
  void *context;
  atomic_int callers; /* threads that are asking the filter */
  route_t *older;
};

enum { ROUTES = 32 }; /* of a device at once */

/* These three without the lock. */
esper_status route_make(esper_pool_filter *filter, void *context, route_t **route);
void route_discard(route_t *route);
/* Until no thread is asking the filter of the route, which was removed. */
void route_wait(route_t *route);

bool route_is_free(const device_t *device);
/* Mallocs look for routes from now on. */
void route_reserve(device_t *device);
void route_add(device_t *device, pool_t *pool, route_t *route);
/* NULL: the pool has none. */
route_t *route_remove(device_t *device, const pool_t *pool);

/* The pool for a malloc of the calling thread for the stream, entered. Without
 * the lock, because filters are not ours. */
esper_status route_choose(device_t *device, void *stream, pool_t **pool);

#endif
