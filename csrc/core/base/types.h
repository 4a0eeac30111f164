/* types.h: the nouns of the core, and how they refer to each other.
 *
 *   core      devices, streams, the address map
 *   device    one GPU: pools, segments, statistics, trace, one lock
 *   pool      heaps whose memory serves nobody else
 *   heap      the free blocks of (pool, stream, capture), in bins by size
 *   front     the few of them that malloc and free reach without the device's lock
 *   ledger    what the statistics have still to hear of a heap's blocks
 *   segment   an address range from the driver; has one home heap. A classic
 *             one is one allocation; a mapped one has pages where it needs them
 *   page      memory of the driver's, mapped into a segment
 *   block     a piece of a segment: live or free; tiles it with its neighbours
 *   hole      a piece of a mapped segment where no page is; tiles it, too
 *   stream    an in-order queue, known by the driver's id
 *   record    an event recorded on a stream, with the stream's next number
 *   use       "that stream may touch the block until this record"
 *
 * What a free block still owes are its obligations: its uses, and its owner
 * order: the work its home stream had enqueued before the free, which events
 * of that stream numbered `stamp` or higher stand for.
 *
 * Locks, in the order they are taken: sync, paging, a stream's record lock, device, then
 * one of map, streams, captures, events, or a front's gate. No driver call is made under a device
 * lock. The record lock is held over event_record and stream_wait, and what is
 * like them inside a capture,
 * because numbers must follow the driver's order (rule 1). */
#ifndef ESPER_TYPES_H
#define ESPER_TYPES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../device/device.h"
#include "../../esper_alloc.h"
#include "arena.h"
#include "../blocks/bins.h"
#include "lock.h"
#include "rules.h"

typedef struct esper_core core_t;
typedef struct esper_pool pool_t;
typedef struct device device_t;
typedef struct heap heap_t;
typedef struct segment segment_t;
typedef struct page page_t;
typedef struct loose loose_t;
typedef struct shared shared_t;
typedef struct import import_t;
typedef struct block block_t;
typedef struct stream stream_t;
typedef struct record record_t;
typedef struct use use_t;
typedef struct opening opening_t;
typedef struct account account_t;
typedef struct capture capture_t;
typedef struct branch branch_t;

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* What different threads write is kept so far apart. */
#define CACHE_LINE 64
#define ON_ITS_OWN_LINE _Alignas(CACHE_LINE)

enum {
  BLOCK_ALIGN = 512,   /* every size is a multiple, every address aligned */
  FRONTIER_ROWS = 256, /* streams with a higher index have no frontier row */
  STREAM_BUCKETS = 256,
  STREAM_EVENTS = 32, /* out of use, kept by the stream; more go to the pool */
};

/* ---- records and uses -------------------------------------------------- */

/* Immutable once made, but for the event, which is free for another record
 * when this one has completed. */
struct record {
  stream_t *stream;
  uint64_t number;
  int64_t time_us;       /* the host's clock; 0: nobody needs it */
  void *event;           /* NULL once completed */
  atomic_int references; /* uses, and the stream's probe */
  atomic_int pins;       /* gates being issued on the event just now */
  bool outstanding;      /* in the stream's list */
  bool captured;         /* its event: later ones have to stand for it */
  record_t *older, *newer;
  record_t *next_dropped; /* or the next spare one */
};

enum {
  USE_AT_FREE = 1u,  /* record_stream: the event is recorded at the free */
  USE_NO_GATE = 2u,  /* depends, maybe, on work not yet enqueued */
  USE_CAPTURED = 4u, /* by a graph, of memory from outside its capture */
};

/* A place in a capture: what the branch's stream had recorded by then. */
typedef struct place {
  branch_t *branch; /* NULL: none; a reference */
  uint64_t number;  /* of the branch; 0: before everything */
  void *node;
} place_t;

struct use {
  use_t *next;
  stream_t *stream;
  record_t *record; /* NULL: none could be or was recorded; holds the block */
  uint64_t stamp;   /* of a held use of a free block: the stream's events with
                       this number or a higher one cover it; 0: none does     */
  place_t place;    /* of a use inside a capture, which has no record */
  unsigned flags;
};

/* ---- streams ----------------------------------------------------------- */

/* Streams by index, so that the few with records to ask about are found among
 * many. */
enum { GROUP_STREAMS = 64 };

typedef struct stream_group {
  _Atomic uint64_t listed; /* bit i: stream[i] has outstanding records, or had */
  stream_t *stream[GROUP_STREAMS];
  struct stream_group *older;
} stream_group_t;

struct stream {
  /* Read by every malloc and seldom written. */
  ON_ITS_OWN_LINE void *handle; /* of a mortal stream: for show only */
  device_t *device;
  stream_t *next_by_handle; /* immortal ones, by handle */
  _Atomic(heap_t *) heap;   /* of the default pool, outside captures; or NULL */
  atomic_bool holds;        /* some free block has a use here, no record */
  atomic_bool kept;         /* a heap is its own, or a use without record was on it */
  atomic_bool immortal;
  bool all_streams;    /* the stand-in for everything that runs on the device */
  atomic_uint traits;  /* ESPER_TRAIT_...; the stand-in has those of any stream */
  _Atomic uint64_t id; /* the driver's; never used again */
  core_t *core;

  ON_ITS_OWN_LINE _Atomic uint64_t last; /* the last number taken: every free reads it */
  unsigned index;                        /* of its row in other streams' frontiers */
  bool listed;                           /* there; under the record lock */
  stream_group_t *group;
  stream_t *next;           /* all streams of the core */
  stream_t *next_in_bucket; /* by id */

  ON_ITS_OWN_LINE mutex_t lock; /* the record lock: all below but the atomics, and `last` */
  _Atomic uint64_t completed;   /* every number up to this one has completed */
  record_t *oldest, *newest;    /* outstanding records, by number */
  unsigned outstanding;         /* how many */
  unsigned ask_at;              /* so many are worth a question */
  _Atomic int64_t oldest_us;    /* the oldest one's time */
  record_t *spare;              /* records out of use */
  void *events[STREAM_EVENTS];  /* events out of use: the last event_count */
  unsigned event_count;
  atomic_bool has_outstanding;
  _Atomic(record_t *) dropped; /* records nobody refers to, to be pooled */
  uint64_t syncing;            /* what a synchronisation will have completed */
  record_t *probe;             /* of the owner order, for other streams' sake */
  _Atomic uint64_t frontier[FRONTIER_ROWS];
};

/* ---- blocks, segments, heaps, pools ------------------------------------ */

typedef enum block_state {
  BLOCK_GONE, /* its host memory was returned, and reads as zeros */
  BLOCK_LIVE,
  BLOCK_READY,   /* free, satisfied for its home stream, in heap->ready */
  BLOCK_WARM,    /* the same, but in heap->front */
  BLOCK_PENDING, /* free, owes uses, in heap->pending */
  BLOCK_CLAIMED, /* free or becoming so, in the hands of one thread, unlocked */
  BLOCK_HOLE,    /* no page is there: in no bin, not in the map, owes nothing */
  BLOCK_FILLING, /* a hole into which one thread is mapping pages, unlocked */
  BLOCK_STALE,   /* its pages serve elsewhere, but are still mapped here: what
                    was enqueued before they moved may still run              */
} block_state;

/* Fields that have nothing to say at the same time share their place: programs have
 * many blocks. */
struct block {
  size_t size;
  segment_t *segment;
  /* Read by map_find without a lock, even of blocks that are gone. */
  uintptr_t address;
  block_t *map_next;
  union {
    block_t *left;      /* in its bin */
    uint16_t fits_best; /* warm: the front's epoch in which it was found to */
  };
  union {
    block_t *right; /* in its bin */
    bool oversize;  /* live, and counted as such */
  };
  union {
    size_t requested; /* by the last malloc; until satisfied */
    block_t **place;  /* of a ready one: what points to it in its bin */
  };
  uint8_t state; /* a block_state; see block_set_state */
  union {
    bool plain;  /* live: at home, outside captures, not oversize */
    bool barred; /* pending: counted in heap->waits.barred */
  };
  bool withheld;       /* free, but nobody's until its pool is sealed */
  bool counted_active; /* in the statistics, as active */
  uint32_t user;       /* stream it was last handed out on; see block_user */

  block_t *prev, *next; /* neighbours by address */
  use_t *uses;
  uint64_t stamp; /* owner order; 0: the home stream never had it */
  union {
    uint64_t capture; /* live: that it was handed out in; 0: none */
    block_t *older;   /* pending blocks of the heap, by time of the free;
                             holes of the segment, and stale blocks of the
                             device, in no order                              */
  };
  union {
    block_t *newer;
    uint64_t birth; /* of a ready one: of its segment */
  };
};

_Static_assert(sizeof(block_t) <= 112, "docs/design.md: 112 bytes a block");

/* A page that the driver would neither map nor take back. */
struct loose {
  uint64_t handle;
  size_t size; /* 0: there is none */
  loose_t *next;
};

/* A page that other processes may open. */
struct shared {
  esper_page_name name;
  segment_t *segment;
  size_t first; /* granule of the segment */
  shared_t *next;
};

struct segment {
  /* Read by every malloc and free of a block there. The first word is the arena's once the
   * segment has gone; who frees twice may still read the others. */
  ON_ITS_OWN_LINE size_t bytes; /* of the memory there; of a classic segment its size */
  heap_t *heap;
  device_t *device;
  page_t *pages;     /* by granule; NULL: a classic segment */
  uint64_t sequence; /* of its birth: orders blocks the same in every run */
  uint64_t used_at;  /* device->large_requests when memory of it was last freed */
  bool large;
  bool oversize; /* counted as such */
  bool captured; /* handed out inside a capture: replays may touch it */
  bool pinned;   /* somebody else knows its pages: none is unmapped */

  uintptr_t address;
  size_t size; /* of the addresses */
  block_t *first;
  size_t touched; /* entries of its pages from the first on that were ever used */
  block_t *holes;
  segment_t *prev, *next; /* of the device, by birth */
};

/* How much of something: blocks, their bytes, the bytes asked for. */
typedef struct amounts {
  int64_t count, bytes, requested;
} amounts_t;

/* What the statistics have not yet heard of a heap's blocks (ledger.h). `room` is
 * by ESPER_ALL and size class, the rest by size class: small, large. */
typedef struct ledger {
  ON_ITS_OWN_LINE amounts_t room[ESPER_CLASSES]; /* may still become active without
                         any peak being passed                                */
  amounts_t taken[2];                            /* became live */
  amounts_t freed[2], satisfied[2];              /* not both at once */
  amounts_t paired[2];                           /* the lesser of these two: it is room again */
  amounts_t granted[ESPER_CLASSES];              /* of the room */
  unsigned number;                               /* goes to the purse of this number first */
  int64_t keeps, much; /* blocks: with room for more than `much` it shares, and keeps
                          room for so many                                    */
} ledger_t;

enum {
  FRONT_SLOTS = 16, /* sizes */
  FRONT_DEPTH = 64, /* blocks of a size */
};

/* Room that no ledger has just now (ledger.h). */
typedef struct purse {
  ON_ITS_OWN_LINE latch_t latch; /* taken after a front's gate */
  atomic_bool empty;             /* has nothing; may be read without the latch */
  int frugal;                    /* visits for which a ledger keeps hardly anything */
  amounts_t left[ESPER_CLASSES];
} purse_t;

enum { PURSES = 8 };

/* What a malloc wants that waits at its front's gate. */
typedef struct wish {
  ON_ITS_OWN_LINE atomic_int state;
  size_t size, requested;
  block_t *block; /* once it is granted */
} wish_t;

/* front.h. All but the gate is under the gate: that of an open front is taken by
 * whoever is at work in it, that of a closed one stays with the device's lock. */
typedef struct front {
  ON_ITS_OWN_LINE atomic_int gate;
  uint16_t epoch;  /* rises when the front is emptied; 0 is never used */
  bool empty;      /* whoever holds the device's lock said so; the gate is closed */
  bool held;       /* is not to be emptied */
  bool stopped;    /* the gate is held by who has the device's lock */
  bool paused;     /* by fronts_pause */
  bool locked;     /* serves those who hold the device's lock, and nobody else */
  uint16_t filled; /* bit i: slot i has blocks */
  uint8_t count[FRONT_SLOTS];
  _Atomic uint64_t questions;  /* to the driver, whether the stream is captured */
  uint32_t units[FRONT_SLOTS]; /* the size of a slot's blocks, in BLOCK_ALIGN */
  ledger_t ledger;
  block_t *block[FRONT_SLOTS][FRONT_DEPTH];
  wish_t wish;
} front_t;

enum { WAITS = 8 }; /* streams; with more of them every pending block is looked at */

/* No pending block of the heap waits for an earlier event of the stream. */
typedef struct awaited {
  const stream_t *stream;
  uint64_t from;
} awaited_t;

typedef struct waits {
  size_t barred[2]; /* by size class: blocks that owe a use which bars gates */
  unsigned count;
  bool unknown; /* some wait for something else */
  awaited_t on[WAITS];
} waits_t;

struct heap {
  front_t front;
  pool_t *pool;
  stream_t *stream;
  uint64_t capture;   /* 0, or the capture this memory was handed out in */
  bool sealed;        /* what is ready owes nothing: any capture may take over */
  bool over;          /* its capture is; said by the seal that is being made */
  uint64_t sealed_at; /* number up to which the seal waited for the stream, for
                       the sake of live memory of captures; 0: it did not     */
  branch_t *branch;   /* the stream inside the capture; NULL: outside any; a
                       reference                                              */
  bins_t ready[2];    /* by size class: small, large */
  bins_t pending[2];
  waits_t waits; /* of the pending ones */
  block_t *oldest_pending, *newest_pending;
  uint64_t seen_epoch; /* core->epoch when the pending blocks were last read */
  unsigned borrowed;   /* small blocks of other heaps, since it was to grow instead */
  heap_t *next;        /* of the pool, or of the spare ones */
};

/* Goes when nobody refers to it, nobody is at work in it, and its memory went
 * back. The default pool is always referred to. */
struct esper_pool {
  device_t *device;
  uint64_t id[2];
  int references;      /* of captures and pool objects */
  int busy;            /* calls that are at work in it, without the lock */
  bool open;           /* has an opening */
  bool idle;           /* nobody refers to it, and it has no memory: pool_collect */
  bool checkpointed;   /* for a tree of graphs, which touch all of its memory */
  uint64_t released;   /* what of all streams' work was there when the last
                        reference went, or the last block after that          */
  bool created;        /* by its own call, not by what first allocates to it */
  bool use_on_oom;     /* serves the default pool's requests when memory is short */
  bool no_split;       /* a segment is one block */
  esper_source source; /* all zero: the driver */
  account_t *account;  /* NULL: the default pool's */
  heap_t *heaps;
  pool_t *next;
};

/* What a private pool has reserved: account.h. */
struct account {
  esper_pool_stats figures;
  bool open;       /* its pool is there */
  bool used;       /* it had memory */
  account_t *next; /* of the device, older ones */
};

/* A pool that allocations go to now, if its filter says so. */
struct opening {
  pool_t *pool;
  esper_pool_filter *filter;
  void *context;
  atomic_int callers; /* threads that are asking the filter */
  opening_t *older;
};

typedef struct trace {
  esper_trace_entry *entries;  /* a ring, NULL when off */
  size_t capacity, limit;      /* it grows up to the limit before it wraps */
  uint64_t count;              /* written since the start */
  esper_trace_watch_fn *watch; /* told of each entry; NULL: nobody is */
  void *watch_context;
} trace_t;

/* A gate, for the hang report. */
typedef struct gate {
  const stream_t *waiting; /* was made to wait */
  record_t *record;        /* for this; NULL: an empty place */
  size_t size;             /* of the block */
  int64_t issued_us;
} gate_t;

enum { GATES = 64 };

struct device {
  ON_ITS_OWN_LINE core_t *core;
  int index;
  atomic_bool ready; /* the rest is set up */
  atomic_int opening_count;
  stream_t *legacy;      /* the default stream */
  stream_t *all_streams; /* stands for every stream: see event_record_all */

  purse_t purses[PURSES];
  atomic_uint ledgers; /* of the default pool that were ever made */

  ON_ITS_OWN_LINE mutex_t sync_lock; /* one thread synchronises the device at a time */
  mutex_t lock;                      /* all below, and all heaps, segments, blocks, uses */
  pool_t *pools;                     /* the default pool is `default_pool` */
  pool_t default_pool;
  account_t *accounts;    /* of private pools, the youngest first */
  pool_t *gone_pools;     /* to be buried without the lock: their sources are not ours */
  heap_t *spare_heaps;    /* never given back: a free may still look at one */
  opening_t *openings;    /* newest first */
  int captures_announced; /* that go on */
  segment_t *first_segment, *last_segment;
  block_t *stale; /* blocks that are mapped and have no memory */
  uint64_t next_sequence;
  size_t total; /* bytes of device memory */
  /* Asked for when pages are first wanted: classic segments need none of it. */
  atomic_bool granule_known;
  size_t granule; /* pages are multiples of it; 0: none can be mapped */
  loose_t *loose; /* pages that are mapped nowhere */
  size_t loose_bytes;
  pthread_rwlock_t paging; /* peers.h; guards these, and the names of pages */
  size_t shared_count;     /* pages that have a name */
  int *peers;              /* devices that may access all pages */
  int peer_count;
  import_t *imports; /* pages of other processes; and under the lock, too */
  double fraction;
  size_t limit;            /* SIZE_MAX: none */
  size_t reserving;        /* bytes being obtained, and loose: not in the statistics */
  uint64_t large_requests; /* so far: the clock of what is not used for long */
  int hands;               /* calls that hold memory which they may not keep: hands.h */
  unsigned hands_left;     /* so often they left some */
  bell_t hands_emptied;
  size_t refused;        /* the segment that the driver had no memory for; 0: none */
  size_t room_used;      /* bytes of pages that were made for room: room.h */
  uint64_t room_ran_out; /* pages that had moved when memory ran out last */
  esper_stats stats;
  esper_counters counters;
  arena_t blocks, segments, uses, loose_pages;
  trace_t trace;
  gate_t gates[GATES]; /* a ring */
  unsigned next_gate;

  /* Streams of our own that carry the uses that come as an event; those that
     must not be gated on have the second, and delay no others. */
  _Atomic(stream_t *) carriers[2];

  mutex_t events_lock;
  void **events; /* pooled */
  size_t event_count, event_capacity;
  uint64_t events_alive, events_created;
  arena_t records;
};

enum { DRIVER_CALLS = 32 };

struct esper_core {
  /* Read by every malloc and free, and seldom written. */
  ON_ITS_OWN_LINE const esper_driver *driver;
  device_t *devices;
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
  _Atomic(stream_group_t *) stream_groups; /* newest first */

  ON_ITS_OWN_LINE _Atomic uint64_t driver_calls[DRIVER_CALLS]; /* fronts have more */
  mutex_t config_lock; /* setting up devices, and tracing, too */
  mutex_t streams_lock;
  unsigned stream_count;
  _Atomic uint64_t epoch; /* rises when an obligation may have been satisfied */
  mutex_t captures_lock;
  capture_t *captures; /* that somebody refers to */
};

/* A front's owner reads the states of neighbours while others, who hold the device's
 * lock, change those that mean nothing to it. */
static inline void block_set_state(block_t *block, block_state state)
{
  __atomic_store_n(&block->state, (uint8_t)state, __ATOMIC_RELAXED);
}

static inline block_state block_state_of(const block_t *block)
{
  return (block_state)__atomic_load_n(&block->state, __ATOMIC_RELAXED);
}

/* ---- asserts ----------------------------------------------------------- */

/* Our own mistakes; the caller's are answered with ESPER_INVALID. */
void core_assert_failed(const char *what, const char *file, int line);
#ifdef NDEBUG
#define core_assert(x) ((void)sizeof(x))
#else
#define core_assert(x) ((x) ? (void)0 : core_assert_failed(#x, __FILE__, __LINE__))
#endif

#endif
