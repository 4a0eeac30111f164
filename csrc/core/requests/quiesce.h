/* quiesce.h: quiescing a pool, before captures take their memory from it. */
#ifndef ESPER_QUIESCE_H
#define ESPER_QUIESCE_H

#include "../base/types.h"

/* The host waits for what the pool's free memory owes, by one event for all streams and one of each
 * stream with a use, because inside a capture no work outside can be waited for. What cannot be
 * waited for still owes, and is withheld until the next quiesce. Memory of captures that are over
 * becomes memory of the pool again, because the graphs of one pool are replayed in the order in
 * which they were captured (rule 8). Call it after the pool was begun and before its filter is set.
 * Without the lock. */
void quiesce_pool(pool_t *pool);

/* Lets memory of pools without references owe their graphs nothing, and merges it. That is allowed
 * once the device was synchronised after the last reference went. A pool in which a call is working
 * is left alone, apart from the caller's own call in `ours`. */
void quiesce_unreferenced(device_t *device, const pool_t *ours);

#endif
