/* device.h: one GPU: everything that the core knows of it, and how a call reaches it. */
#ifndef ESPER_CORE_DEVICE_H
#define ESPER_CORE_DEVICE_H

#include "../base/arena.h"
#include "../base/core.h"
#include "../base/lock.h"
#include "../base/tag.h"
#include "../stats/stat_shard.h"

/* Addresses for fences: memory/fence.c. */
enum { FENCE_RANGES = 64 };
typedef struct fences {
  struct {
    uintptr_t address;
    size_t size;
  } range[FENCE_RANGES];
  int count, current; /* the range that is handed out */
  size_t used;        /* bytes of it */
  uint64_t rounds;    /* how often all of them have been used */
  uint64_t looked_at; /* how many freed blocks were looked at, to find those whose pages can go */
} fences_t;

struct device {
  ON_ITS_OWN_LINE core_t *core;
  int index;
  atomic_bool ready;  /* all that needs the driver is set up */
  atomic_bool failed; /* memory/failure.h; changes under the lock */
  char failure[640];
  atomic_int route_count;
  stream_t *legacy;             /* the default stream */
  stream_t *all_streams;        /* stands for every stream: see event_record_all */
  _Atomic uint64_t rests_until; /* by monotonic_now(); 0: no wait was in vain. See host_wait.h */

  credit_t credit;

  mutex_t sleep_lock;        /* one thread puts memory to sleep or wakes it at a time */
  mutex_t sending_lock;      /* held while pages go to sleep one after the other */
  struct sleeping *sleeping; /* what sleeps; see asleep.h */
  void (*forget_sleeping)(struct device *); /* frees that list; NULL: nothing ever slept */
  stream_t *copier; /* the core's own stream for copies; under the sleep lock */

  ON_ITS_OWN_LINE mutex_t sync_lock; /* one thread synchronises the device at a time */
  mutex_t growth_lock;               /* memory comes, moves and goes in one thread at a time: this
                                        guards where pages are, their names, and what says so */
  mutex_t lock;                      /* guards all below, unless it says otherwise, and all
                                        heaps, segments, blocks, uses */
  heap_t *heaps;                     /* of all pools */
  pool_t *pools;                     /* the default pool is `default_pool` */
  pool_t *default_pool;
  pool_t *gone_pools;     /* for pool_bury, which calls their sources without the lock */
  heap_t *spare_heaps;    /* for reuse; never freed, because a free may still look at one */
  route_t *routes;        /* newest first */
  int captures_announced; /* captures that were announced and go on */
  segment_t *first_segment, *last_segment;
  block_t *stale;    /* blocks still mapped to pages that serve elsewhere */
  bool asleep[TAGS]; /* the tags under which no memory is handed out */
  uint64_t next_sequence;
  size_t total; /* bytes of device memory */
  /* The granularity is asked for when pages are first wanted: classic segments need none. */
  atomic_bool granule_known;
  size_t granule;      /* pages are multiples of it; 0: none can be mapped */
  size_t shared_count; /* pages that have a name */
  int *peers;          /* devices that may access all pages; guarded by the growth lock alone, as
                          is the next */
  int peer_count;
  import_t *imports; /* pages of other processes; guarded by the growth lock as well */
  double fraction;
  size_t limit;              /* SIZE_MAX: none */
  size_t reserving;          /* bytes that MemPools' own allocators are being asked for */
  size_t refused;            /* bytes that the driver had no memory for; 0: none */
  size_t slack_peak;         /* peak of active bytes since pages last went back: memory/slack.c */
  size_t slack_old_peak;     /* the peak of the statistics when they did */
  uint64_t slack_refused_at; /* how many pages had moved when there was no memory for slack */
  esper_stats stats;
  esper_counters counters;
  fences_t fences;
  arena_t blocks, segments, uses;
  esper_trace_watch_fn *watch; /* is told of each action; NULL: nobody is */
  void *watch_context;

  _Atomic(stream_t *) carrier; /* the core's own stream, for uses that come as an event */

  mutex_t events_lock;
  void **events; /* out of use */
  size_t event_count, event_capacity;
  uint64_t events_alive, events_created;
  arena_t records;
};

/* The device, which is set up at its first use. */
esper_status core_device(core_t *core, int index, device_t **device);
/* As core_device, but NULL if the device was never used. For calls that only look or give back:
 * they must not make the driver set the device up for this process. */
esper_status core_used_device(core_t *core, int index, device_t **device);
esper_status core_no_device(const core_t *core, int index);

static inline bool device_has_failed(const device_t *device)
{
  return atomic_load_explicit(&device->failed, memory_order_acquire);
}

/* Limits the share of the device's memory that the core may reserve; 1: no limit. */
esper_status device_set_limit(device_t *device, double fraction);

#endif
