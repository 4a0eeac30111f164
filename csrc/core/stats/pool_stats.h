/* pool_stats.h: what private pools have reserved. Under the device's lock.
 *
 * A pool has statistics from its making on. They outlive it as long as they have something
 * to say: until resets have made them all zero, or many younger pools have gone as well. */
#ifndef ESPER_POOL_STATS_H
#define ESPER_POOL_STATS_H

#include "../base/types.h"

struct pool_stats {
  esper_pool_stats values;
  bool open; /* its pool is there */
  bool used; /* it had memory */
  pool_stats_t *next;
};

enum { KEPT_OF_GONE_POOLS = 256 };

/* `list` is a device's, the youngest first. */

/* The statistics of a pool that is being made: new ones, or those of an earlier pool with
 * the id. NULL: no host memory. */
pool_stats_t *pool_stats_open(pool_stats_t **list, uint64_t id_first, uint64_t id_second);
/* The pool has gone. */
void pool_stats_close(pool_stats_t **list, pool_stats_t *stats);
void pool_stats_destroy(pool_stats_t **list);

/* Bytes came from the device, or went back. `stats` may be NULL: the default pool's. */
void pool_stats_add(pool_stats_t *stats, bool large, size_t bytes);
void pool_stats_remove(pool_stats_t *stats, bool large, size_t bytes);
/* The device did not take back what was counted as gone. */
void pool_stats_kept(pool_stats_t *stats, bool large, size_t bytes);

void pool_stats_reset_peaks(pool_stats_t **list);
void pool_stats_reset_accumulated(pool_stats_t **list);

#endif
