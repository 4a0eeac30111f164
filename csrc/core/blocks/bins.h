/* bins.h: free blocks by size, for best fit.
 *
 * Sizes fall into bins: one size a bin up to 16 KiB, then 32 bins for each power of two. Two levels
 * of bitmaps find the next occupied bin in two instructions. Within a bin the blocks form a treap
 * in the order (size, birth of the segment, address), so the best fit is found in logarithmic time
 * and does not depend on addresses that the driver chose. Priorities are hashes of the address. In
 * bins that are `placed`, a block also knows the link that points to it and its segment's birth: it
 * leaves without a search, and comparing costs fewer cache misses. */
#ifndef ESPER_BINS_H
#define ESPER_BINS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct block;

enum {
  BINS_PER_DOUBLING = 32,
  BINS_DOUBLINGS = 36, /* up to 2^49 bytes */
  BINS_COUNT = BINS_PER_DOUBLING * BINS_DOUBLINGS,
};

typedef struct bins {
  uint64_t occupied;                    /* bit i: doubling i has blocks */
  uint32_t occupied_in[BINS_DOUBLINGS]; /* the same for the bins of a doubling */
  struct block *root[BINS_COUNT];
  size_t count;
  bool placed; /* block->place and ->birth are used; chosen while the bins are empty */
} bins_t;

unsigned bins_index(size_t size);
void bins_insert(bins_t *bins, struct block *block);
void bins_remove(bins_t *bins, struct block *block);

/* The first block of at least `size` bytes, or NULL. */
struct block *bins_best_fit(const bins_t *bins, size_t size);
/* The block that follows in best-fit order, or NULL. */
struct block *bins_next(const bins_t *bins, const struct block *block);
struct block *bins_largest(const bins_t *bins);

bool bins_is_valid(const bins_t *bins);

#endif
