/* types.h: the nouns of the core, and how they refer to each other.
 *
 *   core      devices, streams, the address map
 *   device    one GPU: pools, segments, statistics, trace, one lock
 *   pool      heaps whose memory serves nobody else
 *   heap      the free blocks of (pool, stream, capture), in bins by size
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
 * Locks, in the order they are taken: sync, a stream's record lock, device, then
 * one of map, streams, captures, events. No driver call is made under a device
 * lock. The record lock is held over event_record and stream_wait, and what is
 * like them inside a capture,
 * because numbers must follow the driver's order (rule 1). */
#ifndef ESPER_TYPES_H
#define ESPER_TYPES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../device/device.h"
#include "../esper_alloc.h"
#include "arena.h"
#include "bins.h"
#include "lock.h"
#include "rules.h"

typedef struct esper_core core_t;
typedef struct esper_pool pool_t;
typedef struct device device_t;
typedef struct heap heap_t;
typedef struct segment segment_t;
typedef struct page page_t;
typedef struct loose loose_t;
typedef struct block block_t;
typedef struct stream stream_t;
typedef struct record record_t;
typedef struct use use_t;
typedef struct opening opening_t;
typedef struct capture capture_t;
typedef struct branch branch_t;

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

enum {
  BLOCK_ALIGN = 512,   /* every size is a multiple, every address aligned     */
  FRONTIER_ROWS = 256, /* streams with a higher index have no frontier row    */
  STREAM_BUCKETS = 256,
  STREAM_EVENTS = 32, /* out of use, kept by the stream; more go to the pool  */
};

/* ---- records and uses -------------------------------------------------- */

/* Immutable once made, but for the event, which is free for another record
 * when this one has completed. */
struct record {
  stream_t *stream;
  uint64_t number;
  int64_t time_us;       /* the host's clock; 0: nobody needs it              */
  void *event;           /* NULL once completed                               */
  atomic_int references; /* uses, and the stream's probe                      */
  atomic_int pins;       /* gates being issued on the event just now          */
  bool outstanding;      /* in the stream's list                              */
  record_t *older, *newer;
  record_t *next_dropped; /* or the next spare one                            */
};

enum {
  USE_AT_FREE = 1u, /* record_stream: the event is recorded at the free       */
  USE_NO_GATE = 2u, /* depends, maybe, on work not yet enqueued               */
  USE_CAPTURED = 4u, /* by a graph, of memory from outside its capture        */
};

/* A place in a capture: what the branch's stream had recorded by then. */
typedef struct place {
  branch_t *branch; /* NULL: none; a reference                                */
  uint64_t number;  /* of the branch; 0: before everything                    */
  void *node;
} place_t;

struct use {
  use_t *next;
  stream_t *stream;
  record_t *record; /* NULL: none could be or was recorded; holds the block   */
  uint64_t stamp;   /* of a held use of a free block: the stream's events with
                       this number or a higher one cover it; 0: none does     */
  place_t place;    /* of a use inside a capture, which has no record         */
  unsigned flags;
};

/* ---- streams ----------------------------------------------------------- */

/* Streams by index, so that the few with records to ask about are found among
 * many. */
enum { GROUP_STREAMS = 64 };

typedef struct stream_group {
  _Atomic uint64_t listed;         /* bit i: stream[i] has outstanding records, or had */
  stream_t *stream[GROUP_STREAMS];
  struct stream_group *older;
} stream_group_t;

struct stream {
  core_t *core;
  device_t *device;
  _Atomic uint64_t id; /* the driver's; never used again                      */
  unsigned index;   /* of its row in other streams' frontiers                 */
  stream_group_t *group;
  bool listed;      /* there; under the record lock                           */
  atomic_bool kept; /* a heap is its own, or a use without record was on it   */
  void *handle;     /* of a mortal stream: for show only                      */
  atomic_bool immortal;
  bool all_streams; /* the stand-in for everything that runs on the device    */
  atomic_uint traits; /* ESPER_TRAIT_...; the stand-in has those of any stream */

  mutex_t lock;        /* the record lock: all below but the atomics  */
  _Atomic uint64_t last;       /* the last number taken                       */
  _Atomic uint64_t completed;  /* every number up to this one has completed   */
  record_t *oldest, *newest;   /* outstanding records, by number              */
  unsigned outstanding;        /* how many                                    */
  unsigned ask_at;             /* so many are worth a question                */
  _Atomic int64_t oldest_us;   /* the oldest one's time                       */
  record_t *spare;             /* records out of use                          */
  void *events[STREAM_EVENTS]; /* events out of use: the last event_count     */
  unsigned event_count;
  atomic_bool has_outstanding;
  _Atomic(record_t *) dropped; /* records nobody refers to, to be pooled      */
  uint64_t syncing;            /* what a synchronisation will have completed  */
  record_t *probe;             /* of the owner order, for other streams' sake */
  atomic_bool holds;           /* some free block has a use here, no record   */
  _Atomic uint64_t frontier[FRONTIER_ROWS];

  stream_t *next;           /* all streams of the core                        */
  stream_t *next_in_bucket; /* by id                                          */
  stream_t *next_by_handle; /* immortal ones, by handle                       */
};

/* ---- blocks, segments, heaps, pools ------------------------------------ */

typedef enum block_state {
  BLOCK_LIVE,
  BLOCK_READY,   /* free, satisfied for its home stream, in heap->ready       */
  BLOCK_WARM,    /* the same, but the one block in heap->warm                 */
  BLOCK_PENDING, /* free, owes uses, in heap->pending                         */
  BLOCK_CLAIMED, /* free or becoming so, in the hands of one thread, unlocked */
  BLOCK_HOLE,    /* no page is there: in no bin, not in the map, owes nothing */
  BLOCK_FILLING, /* a hole into which one thread is mapping pages, unlocked   */
  BLOCK_STALE,   /* its pages serve elsewhere, but are still mapped here: what
                    was enqueued before they moved may still run              */
} block_state;

struct block {
  size_t size;
  size_t requested; /* by the last malloc                                     */
  segment_t *segment;
  block_t *prev, *next;   /* neighbours by address                            */
  block_t *left, *right;  /* in its bin                                       */
  block_t *older, *newer; /* pending blocks of the heap, by time of the free;
                             holes of the segment, and stale blocks of the
                             device, in no order                              */
  use_t *uses;
  stream_t *user;         /* stream it was last handed out on; NULL: never    */
  uint64_t stamp;         /* owner order; 0: the home stream never had it     */
  uint64_t capture;       /* that it was last handed out in; 0: none          */
  block_state state;
  bool withheld;          /* free, but nobody's until its pool is sealed      */
  bool counted_active;    /* in the statistics, as active                     */
  bool counted_split;     /* in the statistics, as an inactive part           */
  bool oversize;          /* live, and counted as such                        */
  /* Read by map_find without a lock, even of blocks that are gone. */
  uintptr_t address;
  block_t *map_next;
};

/* A page that the driver would neither map nor take back.                      */
struct loose {
  uint64_t handle;
  size_t size; /* 0: there is none                                            */
  loose_t *next;
};

struct segment {
  uintptr_t address;
  size_t size;       /* of the addresses                                      */
  size_t bytes;      /* of the memory there; of a classic segment its size    */
  uint64_t sequence; /* of its birth: orders blocks the same in every run     */
  device_t *device;  /* for who does not hold its lock yet: heaps come and go  */
  heap_t *heap;
  block_t *first;
  page_t *pages;     /* by granule; NULL: a classic segment                   */
  size_t touched;    /* entries of them from the first on that were ever used  */
  block_t *holes;
  bool pinned;       /* somebody else knows its pages: none is unmapped       */
  bool large;
  bool oversize; /* counted as such */
  bool captured; /* handed out inside a capture: replays may touch it         */
  segment_t *prev, *next; /* of the device, by birth                          */
};

struct heap {
  pool_t *pool;
  stream_t *stream;
  uint64_t capture; /* 0, or the capture this memory was handed out in        */
  bool sealed;      /* what is ready owes nothing: any capture may take over  */
  bool over;        /* its capture is; said by the seal that is being made    */
  uint64_t sealed_at; /* number up to which the seal waited for the stream, for
                       the sake of live memory of captures; 0: it did not     */
  branch_t *branch; /* the stream inside the capture; NULL: outside any; a
                       reference                                              */
  bins_t ready[2];  /* by size class: small, large                            */
  bins_t pending[2];
  block_t *warm; /* freed last, kept whole and unmerged: it is often asked for
                    next; whoever needs anything else settles it first       */
  block_t *oldest_pending, *newest_pending;
  uint64_t seen_epoch; /* core->epoch when the pending blocks were last read  */
  heap_t *next;
};

/* Goes when nobody refers to it, nobody is at work in it, and its memory went
 * back. The default pool is always referred to. */
struct esper_pool {
  device_t *device;
  uint64_t id[2];
  int references;    /* of captures and pool objects                          */
  int busy;          /* calls that are at work in it, without the lock        */
  bool open;         /* has an opening                                        */
  bool checkpointed; /* for a tree of graphs, which touch all of its memory   */
  uint64_t released; /* what of all streams' work was there when the last
                        reference went, or the last block after that          */
  bool use_on_oom;   /* serves the default pool's requests when memory is short */
  bool no_split;     /* a segment is one block                                */
  esper_source source; /* all zero: the driver                                */
  heap_t *heaps;
  pool_t *next;
};

/* A pool that allocations go to now, if its filter says so. */
struct opening {
  pool_t *pool;
  esper_pool_filter *filter;
  void *context;
  atomic_int callers; /* threads that are asking the filter                   */
  opening_t *older;
};

typedef struct trace {
  esper_trace_entry *entries; /* a ring, NULL when off                        */
  size_t capacity, limit; /* it grows up to the limit before it wraps         */
  uint64_t count; /* written since the start                                  */
  esper_trace_watch_fn *watch; /* told of each entry; NULL: nobody is         */
  void *watch_context;
} trace_t;

/* A gate, for the hang report. */
typedef struct gate {
  const stream_t *waiting; /* was made to wait                                */
  record_t *record;        /* for this; NULL: an empty place                  */
  size_t size;             /* of the block                                    */
  int64_t issued_us;
} gate_t;

enum { GATES = 64 };

struct device {
  core_t *core;
  int index;
  atomic_bool ready; /* the rest is set up                                    */

  mutex_t sync_lock; /* one thread synchronises the device at a time  */
  mutex_t lock; /* all below, and all heaps, segments, blocks, uses   */
  pool_t *pools;        /* the default pool is `default_pool`                 */
  pool_t default_pool;
  pool_t *gone_pools;   /* to be buried without the lock: their sources are not ours */
  opening_t *openings;  /* newest first                                       */
  atomic_int opening_count;
  segment_t *first_segment, *last_segment;
  block_t *stale;       /* blocks that are mapped and have no memory          */
  uint64_t next_sequence;
  size_t total;     /* bytes of device memory                                 */
  /* Asked for when pages are first wanted: classic segments need none of it. */
  atomic_bool granule_known;
  size_t granule;   /* pages are multiples of it; 0: none can be mapped       */
  loose_t *loose;   /* pages that are mapped nowhere                          */
  size_t loose_bytes;
  double fraction;
  size_t limit;     /* 0: none                                                */
  size_t reserving; /* bytes being obtained, and loose: not in the statistics */
  size_t refused;   /* the segment that the driver had no memory for; 0: none  */
  esper_stats stats;
  esper_counters counters;
  arena_t blocks, segments, uses, loose_pages;
  trace_t trace;
  gate_t gates[GATES]; /* a ring                                              */
  unsigned next_gate;

  stream_t *legacy;      /* the default stream                                */
  stream_t *all_streams; /* stands for every stream: see event_record_all     */
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
  const esper_driver *driver;
  uint64_t serial; /* of the process's cores, from 1 */
  _Atomic uint64_t driver_calls[DRIVER_CALLS];
  atomic_bool shut_down;

  mutex_t config_lock; /* setting up devices, and tracing, too        */
  _Atomic(struct config *) config; /* read without a lock                     */
  atomic_bool timing; /* records take the time: reuse order `auto` wants it   */
  int64_t (*clock_us)(void);
  atomic_bool tracing;

  int device_count;
  device_t *devices;

  mutex_t streams_lock;
  _Atomic(stream_t *) streams;
  _Atomic(stream_t *) stream_by_handle[STREAM_BUCKETS];
  _Atomic(stream_t *) stream_by_id[STREAM_BUCKETS];
  _Atomic(stream_group_t *) stream_groups; /* newest first                    */
  unsigned stream_count;
  _Atomic uint64_t epoch; /* rises when an obligation may have been satisfied */

  atomic_bool warned; /* that memory was freed which a graph reads */
  mutex_t captures_lock;
  capture_t *captures; /* that somebody refers to */

  struct map *map; /* address -> block */
};

/* ---- asserts ----------------------------------------------------------- */

/* Our own mistakes; the caller's are answered with ESPER_INVALID. */
void core_assert_failed(const char *what, const char *file, int line);
#ifdef NDEBUG
#define core_assert(x) ((void)sizeof(x))
#else
#define core_assert(x) ((x) ? (void)0 : core_assert_failed(#x, __FILE__, __LINE__))
#endif


#endif
