/* in_flight.h: memory in flight, which calls hold for the moment and must give back. They are
 * returning it to the driver, or moving and creating pages for a request that may fail or need
 * less. Other threads cannot find that memory, so before a thread reports that there is none, it
 * waits for these calls.
 *
 * This does not cover a MemPool's own allocator, which may wait for something that the caller
 * holds. */
#ifndef ESPER_IN_FLIGHT_H
#define ESPER_IN_FLIGHT_H

#include "../base/types.h"

/* Around a call that holds memory. In between, in_flight_note_return says that it has returned
 * some, as free memory or to the driver. Under the device's lock. */
void in_flight_begin(device_t *device);
void in_flight_note_return(device_t *device);
void in_flight_end(device_t *device);

/* How often threads other than the caller's have returned memory. Under the device's lock. */
unsigned in_flight_returned_by_others(const device_t *device);

/* Waits until other threads return memory, that is, until their count differs from
 * *returned_before, and stores the new count there. False: no call holds memory any more, and none
 * was returned. Without the lock. */
bool in_flight_wait(device_t *device, unsigned *returned_before);

#endif
