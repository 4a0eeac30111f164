/* pool.h: pools, their references, and the heaps in them. All but the calls of
 * the public interface under the device's lock. */
#ifndef ESPER_POOL_H
#define ESPER_POOL_H

#include "../blocks/heap.h"

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
  pool_stats_t *stats; /* NULL: the default pool's */
  heap_t *heaps;
  pool_t *next;
};

void pool_init(pool_t *pool, device_t *device, uint64_t id_first, uint64_t id_second);
/* NULL: there is none. */
pool_t *pool_find(device_t *device, uint64_t id_first, uint64_t id_second);
/* The pool with a reference more, made if need be. NULL: no host memory. */
pool_t *pool_refer(device_t *device, uint64_t id_first, uint64_t id_second);
void pool_let_go(pool_t *pool);

/* A call works in the pool without the lock: it stays meanwhile. */
void pool_enter(pool_t *pool);
void pool_leave(pool_t *pool);

/* Nobody refers to the pool: what runs now may still be its graphs. */
void pool_note_work(pool_t *pool);
bool pool_has_memory(const pool_t *pool);
/* Pools that nobody refers to and that have no memory any more go. */
void pool_collect(device_t *device);
/* What is left of them. Without the lock. */
void pool_bury(device_t *device);

/* The pool after this one (NULL: the first) that may serve a request for the default
 * pool when memory is short: entered, and the one before left. NULL: none. */
pool_t *pool_next_spare(device_t *device, pool_t *pool);

/* Whether a segment, wholly free and owing nothing, may go back to the driver, or its
 * pages serve elsewhere: not while a graph may touch it, anybody refers to its private
 * pool, or that is being allocated to. */
bool pool_may_give_back(const segment_t *segment);

/* Whether replays may touch memory of the pool, even what is free to the allocator. */
bool pool_has_graphs(const pool_t *pool);

/* The heap of (pool, stream, capture), made if need be. A capture takes over
 * the stream's sealed heap, if there is one. NULL: no host memory. */
heap_t *pool_heap(pool_t *pool, stream_t *stream, uint64_t capture);
/* Whether what the heap hands out has the same addresses in every run: malloc_deterministic.h. */
bool pool_is_deterministic(const heap_t *heap);
/* The heap's capture is over, or was none. */
void pool_heap_leave_capture(heap_t *heap);
void pool_destroy_heap(heap_t *heap);
void pool_destroy_heaps(pool_t *pool);

bool pool_is_valid(const pool_t *pool);

/* All pending blocks of the device are looked at again. */
void pools_retire(device_t *device);

#endif
