/* core.h: the core itself: its driver, its configuration, its devices and streams. */
#ifndef ESPER_CORE_H
#define ESPER_CORE_H

#include "lock.h"
#include "types.h"

enum { STREAM_BUCKETS = 256, DRIVER_CALLS = 32 };

struct esper_core {
  /* Read by every malloc and free, and seldom written. */
  ON_ITS_OWN_LINE const esper_driver *driver;
  device_t *devices;
  pool_t *default_pools;           /* by device */
  struct map *map;                 /* address -> block */
  _Atomic(struct config *) config; /* read without a lock */
  int device_count;
  atomic_bool shut_down;
  atomic_bool timing; /* records take the time: reuse order `auto` wants it */
  atomic_bool tracing;
  atomic_bool warned; /* that memory was freed which a graph reads */
  int64_t (*clock_us)(void);
  uint64_t serial; /* of the process's cores, from 1 */
  _Atomic(stream_t *) stream_by_handle[STREAM_BUCKETS];
  _Atomic(stream_t *) stream_by_id[STREAM_BUCKETS];
  _Atomic(stream_t *) streams;
  _Atomic(struct stream_group *) stream_groups; /* newest first */

  ON_ITS_OWN_LINE _Atomic uint64_t driver_calls[DRIVER_CALLS]; /* fronts have more */
  mutex_t config_lock; /* setting up devices, and tracing, too */
  mutex_t streams_lock;
  unsigned stream_count;
  _Atomic uint64_t epoch; /* rises when an obligation may have been satisfied */
  mutex_t captures_lock;
  capture_t *captures; /* that somebody refers to */
};

#endif
