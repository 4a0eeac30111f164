/* block_cache.h: the blocks of a heap that malloc and free reach without the device's lock.
 *
 * The cache keeps, whole and in no bin, what the heap's stream freed last: the same size is
 * often asked for next. Its blocks owe nothing but owner order. Everybody else counts them
 * as free, and closes the cache first (free_blocks.h), which puts them where the other free
 * blocks are.
 *
 * Whoever works in the cache holds its latch (cache_latch.h). While the latch is open or
 * held, neither the ready bins of the heap change nor the order of the blocks in its
 * segments. So a malloc can tell that a cached block is the one that a best fit among all
 * free blocks would be taken from anyway. docs/design.md, "The block cache". */
#ifndef ESPER_BLOCK_CACHE_H
#define ESPER_BLOCK_CACHE_H

#include "cache_latch.h"

/* ---- without a lock ------------------------------------------------------ */

/* What a malloc that the cache did not serve found out on its way. */
typedef struct cache_attempt {
  stream_t *stream; /* known to live for ever; or NULL */
  size_t size;      /* rounded; 0: it did not get so far */
  bool asked;       /* the driver said that the stream is not captured */
  bool missed;      /* the cache has no such block; its latch is closed */
} cache_attempt_t;

/* Serves a malloc on the stream, if its heap's cache can and the only question to the
 * driver is whether the stream is captured. */
bool cache_malloc(core_t *core, esper_stream stream, size_t size, cache_attempt_t *attempt,
                  void **ptr);

/* Takes the live block that starts at `address`. False: it is not for the cache. */
bool cache_free(block_t *block, uintptr_t address);

/* ---- under the device's lock ---------------------------------------------- */

void cache_init(block_cache_t *cache); /* closed */

/* A cached block becomes live, uncounted; NULL: there is none for the size. The cache is
 * paused. */
block_t *cache_take(heap_t *heap, size_t size, size_t requested);

/* The block that starts at `address` becomes claimed if it is live; counted. */
bool cache_claim_live(block_t *block, uintptr_t address);

/* The statistics hear that a block became live, or that a free one is active no more. */
void cache_count_allocated(block_t *block);
void cache_count_satisfied(const block_t *block);

/* How often the driver was asked whether a stream is captured. Takes the device's lock. */
uint64_t caches_queries(device_t *device);

bool cache_is_valid(heap_t *heap);

#endif
