/* wake.h: waking the memory of tags.
 *
 * Page by page, the large ones first, physical memory is created and mapped where the page was, and
 * its bytes are copied back while the next page is being mapped. The host waits for the last copy,
 * so that every stream may use the memory afterwards: also those that the core has never met, and
 * graphs. If there is too little memory, what was mapped is given back, and everything still
 * sleeps: the host keeps its copies until all has woken. Pages that one freed block fills do not
 * come back. */
#ifndef ESPER_WAKE_H
#define ESPER_WAKE_H

#include "sleeper.h"

/* Wakes the memory of these tags on the device. *woken grows by the bytes of memory that came back.
 * What esper_wake() promises. Without the lock. */
esper_status wake_device(device_t *device, const bool tags[TAGS], size_t *woken);

#endif
