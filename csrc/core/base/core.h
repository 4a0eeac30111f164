/* core.h: the core itself: its driver, its configuration, its devices and streams. */
#ifndef ESPER_CORE_H
#define ESPER_CORE_H

#include "lock.h"
#include "types.h"

enum { STREAM_BUCKETS = 256, DRIVER_CALLS = 40 };

/* With any of these, no block cache serves a malloc. All are in one word, which every malloc
 * reads. */
enum {
  CORE_SHUT_DOWN = 1u, /* the driver is being unloaded */
  CORE_FENCED = 2u,    /* new memory of the default pools gets a fence */
};

struct esper_core {
  /* Read by every malloc and free, and seldom written. */
  ON_ITS_OWN_LINE const esper_driver *driver;
  device_t *devices;
  pool_t *default_pools;           /* by device */
  struct map *map;                 /* address -> block */
  _Atomic(struct config *) config; /* read without a lock */
  int device_count;
  atomic_uint modes;          /* CORE_... */
  atomic_int asleep;          /* how many tags sleep, counted on each device */
  atomic_int captures_likely; /* routes and announced captures, counted on each device */
  /* Is told of the program's calls; NULL: nobody is. */
  _Atomic(const struct esper_recorder *) recorder;
  atomic_bool warned_of_graph;   /* that memory which a graph reads was freed */
  atomic_bool warned_of_capture; /* that an event for all streams ended a capture */
  atomic_bool ended_a_capture;   /* an event for all streams did */
  uint64_t serial;               /* counts the cores of this process, from 1 */
  _Atomic(stream_t *) stream_by_handle[STREAM_BUCKETS];
  _Atomic(stream_t *) stream_by_id[STREAM_BUCKETS];
  _Atomic(stream_t *) streams;
  _Atomic(struct stream_group *) stream_groups; /* newest first */

  ON_ITS_OWN_LINE _Atomic uint64_t driver_calls[DRIVER_CALLS]; /* block caches count more */
  mutex_t config_lock;                                         /* also guards setting up devices */
  mutex_t streams_lock;
  unsigned stream_count;
  _Atomic uint64_t progress;    /* rises when an obligation may have been satisfied */
  _Atomic uint64_t completions; /* rises when an event of a stream's has completed */
  mutex_t captures_lock;
  capture_t *captures; /* those with references */
};

static inline bool core_is(const core_t *core, unsigned mode)
{
  return atomic_load_explicit(&core->modes, memory_order_relaxed) & mode;
}

#endif
