/* device.h: one GPU, and how a call reaches it. */
#ifndef ESPER_CORE_DEVICE_H
#define ESPER_CORE_DEVICE_H

#include <pthread.h>

#include "../base/arena.h"
#include "../base/core.h"
#include "../base/lock.h"
#include "../stats/stat_shard.h"
#include "../stats/trace_ring.h"
#include "wait_log.h"

struct device {
  ON_ITS_OWN_LINE core_t *core;
  int index;
  atomic_bool ready; /* the rest is set up */
  atomic_int route_count;
  stream_t *legacy;      /* the default stream */
  stream_t *all_streams; /* stands for every stream: see event_record_all */

  credit_t credit;

  ON_ITS_OWN_LINE mutex_t sync_lock; /* one thread synchronises the device at a time */
  mutex_t lock;                      /* all below, and all heaps, segments, blocks, uses */
  heap_t *heaps;                     /* of all pools */
  pool_t *pools;                     /* the default pool is `default_pool` */
  pool_t *default_pool;
  pool_stats_t *pool_stats; /* of private pools, the youngest first */
  pool_t *gone_pools;       /* to be buried without the lock: their sources are not ours */
  heap_t *spare_heaps;      /* never given back: a free may still look at one */
  route_t *routes;          /* newest first */
  int captures_announced;   /* that go on */
  segment_t *first_segment, *last_segment;
  block_t *stale; /* blocks that are mapped and have no memory */
  uint64_t next_sequence;
  size_t total; /* bytes of device memory */
  /* Asked for when pages are first wanted: classic segments need none of it. */
  atomic_bool granule_known;
  size_t granule;    /* pages are multiples of it; 0: none can be mapped */
  orphan_t *orphans; /* pages that are mapped nowhere */
  size_t orphaned_bytes;
  pthread_rwlock_t paging; /* peers.h; guards these, and the names of pages */
  size_t shared_count;     /* pages that have a name */
  int *peers;              /* devices that may access all pages */
  int peer_count;
  import_t *imports; /* pages of other processes; and under the lock, too */
  double fraction;
  size_t limit;                /* SIZE_MAX: none */
  size_t reserving;            /* bytes being obtained, and loose: not in the statistics */
  uint64_t large_requests;     /* so far: the clock of what is not used for long */
  int in_flight;               /* calls that hold memory which they may not keep: hands.h */
  unsigned in_flight_returned; /* so often they left some */
  bell_t in_flight_ended;
  size_t refused;         /* the segment that the driver had no memory for; 0: none */
  size_t slack_peak;      /* of active bytes, since pages last went back: memory/slack.c */
  size_t slack_old_peak;  /* that of the statistics when they did */
  uint64_t slack_ran_out; /* pages that had moved when memory ran out last */
  esper_stats stats;
  esper_counters counters;
  arena_t blocks, segments, uses, orphan_arena;
  trace_t trace;
  logged_wait_t wait_log[WAIT_LOG_ENTRIES]; /* a ring */
  unsigned next_logged_wait;

  /* Streams of our own that carry the uses that come as an event; those that
     must not be gated on have the second, and delay no others. */
  _Atomic(stream_t *) carriers[2];

  mutex_t events_lock;
  void **events; /* pooled */
  size_t event_count, event_capacity;
  uint64_t events_alive, events_created;
  arena_t records;
};

/* The device, set up at its first use. */
esper_status core_device(core_t *core, int index, device_t **device);
/* The same, or NULL where it was never used: what only looks, or gives back, finds nothing
 * there, and must not make the driver set the device up for this process. */
esper_status core_used_device(core_t *core, int index, device_t **device);
esper_status core_no_device(const core_t *core, int index);

/* The share of the device's memory that the core may reserve; 1: all of it. */
esper_status device_set_limit(device_t *device, double fraction);

#endif
