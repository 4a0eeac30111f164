/* grow.h: gets more memory for a heap: pages for a hole of its mapped segment or, where none can be
 * mapped, a classic segment. */
#ifndef ESPER_GROW_H
#define ESPER_GROW_H

#include "../base/types.h"

typedef enum pages_from {
  ANY_PAGES,   /* all new if slack allows it, else as MOVED_FIRST */
  MOVED_FIRST, /* creates pages only for what moved ones leave missing */
  NEW_PAGES    /* moves none */
} pages_from_t;

/* Stores a block of at least `size` bytes, claimed by the caller, which owes the heap's stream
 * nothing. ESPER_OUT_OF_MEMORY: the driver has no more, or the memory fraction allows no more.
 * ESPER_REJECTED: see segment_check_limits. Under the growth lock, unless the pool has an allocator
 * of its own. */
esper_status grow(heap_t *heap, size_t size, bool large, pages_from_t from, block_t **block);

/* How much the device may have to provide for that. */
size_t grow_size(const pool_t *pool, size_t size);

#endif
