/* imports.h: pages of other processes, mapped here.
 *
 * An import is a range of addresses with the pages that were named, one after the other. It goes
 * when the work that was enqueued before it was closed is over. Where the host may not wait for
 * that, or the driver will not take something back, it is tried again whenever somebody comes
 * by. */
#ifndef ESPER_IMPORTS_H
#define ESPER_IMPORTS_H

#include "../memory/imported.h"

/* Of what esper_open_shared() and esper_close_shared() say. */
esper_status imports_open(device_t *device, const esper_page_name *names, size_t count,
                          void **address);
esper_status imports_close(core_t *core, void *address);

/* Unmaps what was closed, as far as it may be waited for; `asked`: the caller wants to wait for
 * whatever is at work, rendezvous or not. Without the lock. */
void imports_reap(device_t *device, bool asked);

/* All of it goes, when the core ends. */
void imports_destroy(device_t *device);

#endif
