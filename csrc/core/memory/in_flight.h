/* in_flight.h: memory in the hands of calls that may not keep it. They give it back to the
 * driver, or move pages and ask for new ones for a request that may fail, or that needs less
 * than comes. Nobody else finds that memory meanwhile, so whoever would report that there is
 * none waits for them.
 * Not for the allocator of a MemPool, which may wait for what the caller holds. */
#ifndef ESPER_IN_FLIGHT_H
#define ESPER_IN_FLIGHT_H

#include "../base/types.h"

/* All under the device's lock, the second in between the others: there may be memory once
 * the hands are empty, free or the driver's. */
void in_flight_begin(device_t *device);
void in_flight_note_return(device_t *device);
void in_flight_end(device_t *device);

/* How often other threads than the caller's left some. Under the device's lock. */
unsigned in_flight_returned_by_others(const device_t *device);

/* Waits until others have left some since *left was so many, which becomes how often they
 * have by now. False: they have not, and all hands are empty. Without the lock. */
bool in_flight_wait(device_t *device, unsigned *left);

#endif
