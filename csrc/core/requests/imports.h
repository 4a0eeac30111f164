/* imports.h: pages of other processes, mapped here.
 *
 * An import is a range of addresses into which the named pages are mapped, one after the other.
 * After it is closed, it is unmapped once the work enqueued before has completed. If the host may
 * not wait for that work, or the driver does not take something back, later calls try again. */
#ifndef ESPER_IMPORTS_H
#define ESPER_IMPORTS_H

#include "../memory/imported.h"

/* What esper_open_shared() and esper_close_shared() promise. */
esper_status imports_open(device_t *device, const esper_page_name *names, size_t count,
                          void **address);
esper_status imports_close(core_t *core, void *address);

/* Unmaps the closed imports if the work that may use them ends soon. Without the lock. */
void imports_reap(device_t *device);

/* Unmaps everything, when the core ends. */
void imports_destroy(device_t *device);

#endif
