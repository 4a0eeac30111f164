/* opening.h: which pool serves a malloc. A pool that was begun and not ended
 * has an opening; its filter says which mallocs the pool serves. Under the
 * device's lock unless said otherwise. */
#ifndef ESPER_OPENING_H
#define ESPER_OPENING_H

#include "../base/types.h"

/* A pool that allocations go to now, if its filter says so. */
struct opening {
  pool_t *pool;
  esper_pool_filter *filter;
  void *context;
  atomic_int callers; /* threads that are asking the filter */
  opening_t *older;
};

enum { OPENINGS = 32 }; /* of a device at once */

/* These three without the lock. */
esper_status opening_make(esper_pool_filter *filter, void *context, opening_t **opening);
void opening_discard(opening_t *opening);
/* Until no thread is asking the filter of the opening, which was removed. */
void opening_wait(opening_t *opening);

bool opening_has_room(const device_t *device);
/* Mallocs look for openings from now on. */
void opening_reserve(device_t *device);
void opening_add(device_t *device, pool_t *pool, opening_t *opening);
/* NULL: the pool has none. */
opening_t *opening_remove(device_t *device, const pool_t *pool);

/* The pool for a malloc of the calling thread for the stream, entered. Without
 * the lock, because filters are not ours. */
esper_status opening_choose(device_t *device, void *stream, pool_t **pool);

#endif
