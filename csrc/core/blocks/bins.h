/* bins.h: free blocks by size, for best fit.
 *
 * Sizes fall into bins: exact up to 16 KiB, then 32 bins for each power of
 * two. Two levels of bitmaps find the next bin that has anything in two
 * instructions. Within a bin the blocks form a treap in the order (size, birth
 * of the segment, address), so the best fit is found in logarithmic time and
 * does not depend on the addresses that the driver chose. The treap needs
 * only the block's two links; its priorities are hashes of the address. Where two more
 * words are free, a block knows what points to it and leaves without a search, whose
 * branches nobody can foretell, and knows its segment's birth, which is else a cache line
 * that nobody has. */
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
  uint64_t occupied;                    /* doublings that have anything */
  uint32_t occupied_in[BINS_DOUBLINGS]; /* bins that have anything */
  struct block *root[BINS_COUNT];
  size_t count;
  bool placed; /* block->place and ->birth are the bins', too: set while they are empty */
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
