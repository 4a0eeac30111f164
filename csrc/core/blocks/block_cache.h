/* block_cache.h: the blocks of a heap that malloc and free reach without the device's lock.
 *
 * The cache keeps what the heap's stream freed last, whole and in no bin, because the same size is
 * often asked for next. Its blocks owe nothing but owner order. Code that looks for free blocks in
 * other ways closes the cache first (free_blocks.h): its blocks go to their bins.
 *
 * A thread in the cache holds its latch (cache_latch.h). While the latch is open or held, the
 * ready bins of the heap and the neighbours of its blocks do not change. So a malloc can tell
 * whether a best fit among all free blocks, merged, would be taken from the same place.
 * docs/design.md, "The block cache". */
#ifndef ESPER_BLOCK_CACHE_H
#define ESPER_BLOCK_CACHE_H

#include "cache_latch.h"

/* ---- without a lock ------------------------------------------------------ */

/* What a malloc that the cache did not serve has found out. */
typedef struct cache_attempt {
  stream_t *stream; /* if it is immortal; or NULL */
  size_t size;      /* rounded; 0: not known yet */
  bool asked;       /* the driver said that the stream is not captured */
  bool missed;      /* the cache has no such block; the malloc closed its latch */
} cache_attempt_t;

/* Serves a malloc on the stream from its heap's cache. The only driver call asks whether the stream
 * is captured. False: the cache cannot serve it, and `attempt` says more. */
bool cache_malloc(core_t *core, esper_stream stream, size_t size, cache_attempt_t *attempt,
                  void **ptr);

/* Frees the live block that starts at `address`. False: the cache cannot take it. */
bool cache_free(block_t *block, uintptr_t address);

/* ---- under the device's lock ---------------------------------------------- */

void cache_init(block_cache_t *cache); /* closed */

/* A cached block becomes live; the caller counts it. NULL: there is none for the size. The cache is
 * paused. */
block_t *cache_take(heap_t *heap, size_t size, size_t requested);

/* The block that starts at `address` becomes claimed, and counts as freed. False: it is not
 * live. */
bool cache_claim_live(block_t *block, uintptr_t address);

/* Counts that a block became live, or that a free one is active no more. */
void cache_count_allocated(block_t *block);
void cache_count_satisfied(const block_t *block);

/* How often the driver was asked whether a stream is captured. Takes the device's lock. */
uint64_t caches_queries(device_t *device);

bool cache_is_valid(heap_t *heap);

#endif
