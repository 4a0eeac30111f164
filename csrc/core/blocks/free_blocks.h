/* free_blocks.h: the free blocks of a heap. Under the device's lock.
 *
 * A free block is *ready* when its heap's stream may have it at once, else *pending*. Ready
 * neighbours merge. Pending blocks do not, so that a long use of a small block does not hold a
 * large one. Some free blocks are in the heap's cache (block_cache.h) instead; a function that
 * changes what is ready closes or pauses the cache first. */
#ifndef ESPER_FREE_BLOCKS_H
#define ESPER_FREE_BLOCKS_H

#include "heap.h"

/* A claimed block becomes a free one. */
void free_blocks_add(block_t *block);

/* As free_blocks_add, but the heap's cache is only paused, and keeps its blocks. */
void free_blocks_add_beside_cache(block_t *block);

/* A claimed block that owes no use goes to the heap's cache if that may be open and has room, else
 * to the bins. */
void free_blocks_cache(block_t *block);

/* Puts all cached blocks into their bins. The cache stays closed until it is opened. */
void cache_close(heap_t *heap);
void caches_close(const device_t *device);
void caches_close_pool(const device_t *device, const pool_t *pool);

/* Opens the heap's cache, except in captures and in private pools, whose addresses would depend on
 * it. While actions are traced, it serves only callers that hold the device's lock. */
void cache_open(heap_t *heap);

/* As cache_malloc, for a caller that holds the lock. `missed`: cache_malloc has just found none.
 * NULL: the cache has no such block, and is closed. */
block_t *cache_take_or_close(heap_t *heap, size_t size, size_t requested, bool missed);

/* A free block becomes claimed, and leaves its bin. */
void free_blocks_claim(block_t *block);

/* Pending blocks whose obligations have been satisfied become ready. False: none has. */
bool free_blocks_promote(heap_t *heap);

/* Withheld blocks serve as soon as they are satisfied, and need no quiesce: the heap's pool has no
 * graphs, and its stream allocates outside captures. */
void free_blocks_release_withheld(heap_t *heap);

/* The ready block that fits best. NULL: there is none. */
block_t *free_blocks_best_ready(const heap_t *heap, size_t size, bool large);

/* The ready block that fits best of those that are a whole segment and owe nothing. NULL: there is
 * none. */
block_t *free_blocks_best_whole(const heap_t *heap, size_t size, bool large);

/* The block's bytes stop counting as active. */
void block_count_inactive(block_t *block);

#endif
