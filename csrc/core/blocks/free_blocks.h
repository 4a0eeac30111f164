/* free_blocks.h: the free blocks of a heap. Under the device's lock.
 *
 * A free block is *ready* when its heap's stream may have it at once, else
 * *pending*. Ready neighbours merge; pending blocks stay as they are until
 * what they owe is satisfied, so that a long use of a small block does not
 * hold a large one. The heap's cache (block_cache.h) has some of them instead; whoever
 * changes what is ready closes it first. */
#ifndef ESPER_FREE_BLOCKS_H
#define ESPER_FREE_BLOCKS_H

#include "heap.h"

/* A claimed block becomes a free one. */
void free_blocks_add(block_t *block);

/* The same, but the heap's cache keeps what it has: only the memory beside it changes. */
void free_blocks_add_beside_cache(block_t *block);

/* A claimed block that owes no use goes to the heap's cache if that can be open, else to
 * the bins. */
void free_blocks_cache(block_t *block);

/* From here on the heap is as if it had no cache, until that is opened. */
void cache_close(heap_t *heap);
void caches_close(const device_t *device);
void caches_close_pool(const device_t *device, const pool_t *pool);

/* Does nothing where the cache must stay closed: in captures, and in private pools, whose
 * addresses would depend on what it has. It serves only those who hold the lock while
 * actions are traced, or the garbage_collection_threshold goes by them. */
void cache_open(heap_t *heap);

/* The same as cache_malloc for a request that holds the lock; `missed`: it looked there a
 * moment ago. NULL: the cache has no such block, and is closed. */
block_t *cache_take_or_close(heap_t *heap, size_t size, size_t requested, bool missed);

/* A free block becomes claimed: it is in no bin. */
void free_blocks_claim(block_t *block);

/* Pending blocks whose obligations have been satisfied become ready. False: none has. */
bool free_blocks_promote(heap_t *heap);

/* What was withheld until the next seal serves as soon as it is satisfied: the heap's pool
 * has no graphs, and serves work outside captures. */
void free_blocks_withhold_none(heap_t *heap);

/* The ready block that fits best; NULL: none. */
block_t *free_blocks_best_ready(const heap_t *heap, size_t size, bool large);

/* The same of those that are a whole segment. */
block_t *free_blocks_best_whole(const heap_t *heap, size_t size, bool large);

/* The block of a capture's heap that fits best of those that the reader, a
 * branch of the same capture, may have: as it is, or after it was made to depend
 * on marked uses, or on uses that ended with a free as well. */
typedef enum inside { INSIDE_ORDERED, INSIDE_GATED, INSIDE_GATED_AT_FREE } inside_t;
block_t *free_blocks_best_inside(const heap_t *heap, const branch_t *reader, size_t size,
                                 bool large, inside_t how);

/* Whether the reader may be gated on what is missing for the block to be ready;
 * `at_free_too`, on uses that end with a free as well. */
bool free_blocks_may_be_gated(const block_t *block, const stream_t *reader, bool at_free_too);

/* The pending block that fits best of those that a stream may be gated on. */
block_t *free_blocks_best_gateable(const heap_t *heap, const stream_t *reader, size_t size,
                                   bool large, bool at_free_too);

/* Neighbouring free blocks of one segment, from `first` to `last`. */
typedef struct run {
  block_t *first, *last; /* NULL: none */
  size_t size;           /* of all of them */
} run_t;

/* Several, ready and pending, that together are large enough and on which a
 * stream may be gated; the smallest of those that a short search finds. */
run_t free_blocks_gateable_run(const heap_t *heap, const stream_t *reader, size_t size, bool large,
                               bool at_free_too);

/* The same as free_blocks_claim and free_blocks_add, for each. */
void free_blocks_claim_run(run_t run);
void free_blocks_add_run(run_t run);

/* A claimed run becomes one claimed block of `size` bytes, which end in its last block. The
 * rest is free again, and owes what its block owed. */
block_t *free_blocks_unite(run_t run, size_t size);

/* Whether some large one wastes an eighth of the request at most. */
bool free_blocks_near_gateable(const heap_t *heap, const stream_t *reader, size_t size);

/* The block's bytes stop counting as active. */
void free_blocks_satisfied(block_t *block);

#endif
