/* event.h: the pool of a device's events and records. */
#ifndef ESPER_EVENT_H
#define ESPER_EVENT_H

#include "../base/types.h"

/* NULL: no event could be created; esper_last_error() says why. */
void *event_take(device_t *device);
void event_give(device_t *device, void *event);
/* Room is kept for every event alive, so giving one back cannot fail. */

/* NULL: no host memory. Its stream keeps it for the next time. */
record_t *record_take(device_t *device);
void record_give(device_t *device, record_t *record);
/* Host memory that no record needs goes back to the system. */
void records_trim(device_t *device);
bool records_are_valid(device_t *device);

void event_destroy_all(device_t *device);

#endif
