/* grow.h: more memory for a heap: pages for a hole of its mapped segment, or, where
 * none can be mapped, a classic segment. */
#ifndef ESPER_GROW_H
#define ESPER_GROW_H

#include "../base/types.h"

/* Stores a block of at least `size` bytes that is satisfied for the heap's stream,
 * claimed by the caller. Without the lock. ESPER_OUT_OF_MEMORY: the driver has no
 * more, or the memory fraction allows no more; ESPER_REJECTED. `alone`: by new pages
 * only, even where some are free. */
esper_status grow(heap_t *heap, size_t size, bool large, bool alone, block_t **block);

/* How much the device may have to give for that. */
size_t grow_size(const pool_t *pool, size_t size);

#endif
