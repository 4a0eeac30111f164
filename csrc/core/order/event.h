/* event.h: a device's events and records that are out of use, for reuse. */
#ifndef ESPER_EVENT_H
#define ESPER_EVENT_H

#include "../base/types.h"

/* NULL: no event could be created; esper_last_error() says why. */
void *event_take(device_t *device);
/* Cannot fail: there is room for every event that exists. */
void event_give(device_t *device, void *event);

/* NULL: no host memory. */
record_t *record_take(device_t *device);
void record_give(device_t *device, record_t *record);
bool records_are_valid(device_t *device);

void event_destroy_all(device_t *device);

#endif
