/* sleep.h: putting the memory of tags to sleep.
 *
 * The order of a sleep: no more memory is handed out under the tags; the host waits, by an event,
 * for everything that was enqueued on every device; free pages go back to the driver; the other
 * pages are chosen and marked as asleep; host memory is obtained; then, batch by batch, what is
 * kept is copied to the host and the pages are unmapped, so that copies and driver calls overlap.
 * All devices have come as far as the copies before one of them begins with these. Until then an
 * error undoes everything. A device that then refuses a copy or keeps a page has failed.
 *
 * A page that sleeps keeps its entry in the page table, its blocks and its addresses. Live blocks
 * on it stay live and may be freed. Free ones, and those that are freed, are BLOCK_ASLEEP until the
 * page wakes. */
#ifndef ESPER_CORE_SLEEP_H
#define ESPER_CORE_SLEEP_H

#include "../../esper_sleep.h"
#include "../order/device.h"

/* Puts the memory of these tags to sleep on one device (`only` NULL: on all that were used), and
 * adds to the figures of *result. What esper_sleep() promises. Without the lock. */
esper_status sleep_devices(core_t *core, const device_t *only, const bool tags[TAGS],
                           esper_keep keep, esper_sleep_result *result);

#endif
