/* asleep.h: pages that sleep. Such a page keeps its entry in the table, its blocks and its
 * addresses. Its memory is absent once it went back to the driver. Free blocks on it are
 * BLOCK_ASLEEP, in no bin. The layer `sleep` decides; here are the books. Under the device's
 * lock. */
#ifndef ESPER_ASLEEP_H
#define ESPER_ASLEEP_H

#include "page_table.h"

/* A page goes to sleep or wakes: updates its entry, which becomes `page`. Under the lock. */
void asleep_set(segment_t *s, page_t page, bool asleep);
/* The memory of a page that sleeps went back to the driver, or is there again: updates its entry,
 * and the statistics. Under the lock. */
void absent_set(segment_t *s, page_t page, bool absent);

/* A claimed free block wakes. Its pages that are absent become holes; what is left is free again.
 * The caller has reserved two blocks in the arena for each of those pages. */
void asleep_free_wakes(block_t *block);

/* The free blocks of a segment wake: all of them, or those that lie on no page that sleeps. */
void asleep_free_blocks_wake(segment_t *s, bool all);

#endif
