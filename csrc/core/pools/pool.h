/* pool.h: pools, their references, and the heaps in them. Under the device's lock unless said
 * otherwise. */
#ifndef ESPER_POOL_H
#define ESPER_POOL_H

#include "../blocks/heap.h"

/* A pool goes when it has no references, no call works in it, and its memory went back. The default
 * pool always has a reference. */
struct esper_pool {
  device_t *device;
  uint64_t id[2];
  int references;      /* by captures and pool objects */
  int busy;            /* calls that work in it without the lock */
  bool open;           /* begun and not ended: routing.h */
  bool idle;           /* may go: set and read by pool_collect */
  bool checkpointed;   /* for a tree of graphs, which may touch all of its memory */
  uint64_t released;   /* number of `all_streams`: work before it may touch the memory */
  bool created;        /* by a call of its own, not by the first allocation to it */
  bool use_on_oom;     /* serves the default pool's requests when memory is short */
  bool no_split;       /* each segment is one block */
  esper_source source; /* all zero: the driver */
  esper_stat reserved_bytes[ESPER_CLASSES]; /* of the pool */
  heap_t *heaps;
  pool_t *next;
};

void pool_init(pool_t *pool, device_t *device, uint64_t id_first, uint64_t id_second);
/* The pool with the id, or NULL. */
pool_t *pool_find(device_t *device, uint64_t id_first, uint64_t id_second);
/* Finds or makes the pool, and adds a reference. NULL: no host memory. */
pool_t *pool_refer(device_t *device, uint64_t id_first, uint64_t id_second);
void pool_let_go(pool_t *pool);

/* Between these two a call may work in the pool without the lock: the pool stays. */
void pool_enter(pool_t *pool);
void pool_leave(pool_t *pool);

/* The pool has no references: notes that work enqueued so far may still be its graphs. */
void pool_note_work(pool_t *pool);
bool pool_has_memory(const pool_t *pool);
/* Takes away the pools that may go. */
void pool_collect(device_t *device);
/* Drops their sources and frees them. Without the lock. */
void pool_bury(device_t *device);

/* Leaves `pool` and enters the next one that may serve the default pool's requests when memory is
 * short. `pool` NULL: the first. Returns NULL after the last. Without the lock. */
pool_t *pool_next_on_oom(device_t *device, pool_t *pool);

/* Whether a segment may go back to the driver, or its pages serve elsewhere, once it is free and
 * owes nothing. Not while a graph may touch it, or while its private pool has references or a
 * route. */
bool pool_may_give_back(const segment_t *segment);

/* Whether replays may touch memory of the pool, even if it is free. */
bool pool_has_graphs(const pool_t *pool);

/* Finds or makes the heap of (pool, stream, capture, tag). A capture takes over the stream's
 * quiesced heap if there is one. NULL: no host memory. */
heap_t *pool_find_or_make_heap(pool_t *pool, stream_t *stream, uint64_t capture, tag_t tag);
/* The heap's capture is over, or there was none. */
void pool_heap_leave_capture(heap_t *heap);
void pool_destroy_heap(heap_t *heap);
void pool_destroy_heaps(pool_t *pool);

bool pool_is_valid(const pool_t *pool);

/* Retires events, and makes the pending blocks that became ready so. Without the lock. */
void pools_retire(device_t *device);

#endif
