/* pool_stats.h: the bytes that private pools have reserved. Under the device's lock.
 *
 * A pool's statistics outlive the pool until resets have made them all zero, or until many younger
 * pools are gone as well. */
#ifndef ESPER_POOL_STATS_H
#define ESPER_POOL_STATS_H

#include "../base/types.h"

struct pool_stats {
  esper_pool_stats values;
  bool open; /* its pool exists */
  bool used; /* the pool had memory at some time */
  pool_stats_t *next;
};

enum { KEPT_OF_GONE_POOLS = 256 };

/* `list` is that of a device, the youngest first. */

/* The statistics of a new pool: those of an earlier pool with the same id if they are left,
 * otherwise new ones. NULL: no host memory. */
pool_stats_t *pool_stats_open(pool_stats_t **list, uint64_t id_first, uint64_t id_second);
/* The pool is gone. */
void pool_stats_close(pool_stats_t **list, pool_stats_t *stats);
void pool_stats_destroy(pool_stats_t **list);

void pool_stats_reset_peaks(pool_stats_t **list);
void pool_stats_reset_accumulated(pool_stats_t **list);

#endif
