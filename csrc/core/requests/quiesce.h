/* quiesce.h: sealing a pool, before captures take their memory from it. */
#ifndef ESPER_QUIESCE_H
#define ESPER_QUIESCE_H

#include "../base/types.h"

/* Work outside a capture cannot be waited for inside it, so the pool's free memory is made to owe
 * nothing: the host waits, one event for each stream that freed to it. What cannot be waited for is
 * withheld until the next time. Memory of captures that are over becomes memory of the pool again:
 * the graphs of one pool are replayed in the order in which they were captured (rule 8). Without
 * the lock; the pool is open, without a filter yet. */
void quiesce_pool(pool_t *pool);

/* The memory of pools that nobody refers to owes their graphs nothing once the device was
 * synchronised after that: it comes together again. Where a call is at work, other than the
 * caller's in `ours`, nothing happens. */
void quiesce_released(device_t *device, const pool_t *ours);

#endif
