/* routing.h: which pool serves a malloc. A pool that was begun and not ended has a route, whose
 * filter says which mallocs the pool serves. Under the device's lock unless said otherwise. */
#ifndef ESPER_ROUTING_H
#define ESPER_ROUTING_H

#include "../base/types.h"

/* Sends a malloc to its pool if the filter says so. */
struct route {
  pool_t *pool;
  esper_pool_filter *filter;
  void *context;
  atomic_int callers; /* threads that are asking the filter */
  bool removed;       /* from the list */
  route_t *older;
};

/* These three are called without the lock. */
esper_status route_make(esper_pool_filter *filter, void *context, route_t **route);
void route_discard(route_t *route);
/* Waits until no thread is asking the filter of a route that was removed. */
void route_wait(route_t *route);

/* Counts a route that is about to be added: mallocs look for routes from now on. */
void route_reserve(device_t *device);
void route_add(device_t *device, pool_t *pool, route_t *route);
/* Takes the pool's route out of the list. NULL: it has none. */
route_t *route_remove(device_t *device, const pool_t *pool);

/* Chooses and enters the pool for a malloc of the calling thread on the stream. Without the lock,
 * because filters are the program's code. */
esper_status route_choose(device_t *device, void *stream, pool_t **pool);

#endif
