/* stalled_driver.h: a driver over another driver. Some of its streams are stalled:
 * they stay busy until they are told otherwise.
 *
 * A replayed history knows that a stream was still reading some memory up to
 * a certain entry, and not what it was doing. Over this driver such a stream
 * is stalled: what is recorded on it has not completed until it is released.
 * Every call goes to the driver below, so that its costs are real; only
 * answers about stalled work differ. Whoever waits for stalled work, the host
 * or a stream, waits until it is over: the wait releases it.
 *
 * Unlike other drivers this one serves one thread at a time. */
#ifndef ESPER_STALLED_DRIVER_H
#define ESPER_STALLED_DRIVER_H

#include "../device/device.h"

typedef struct stalled_driver stalled_driver;

/* NULL: no host memory. `below` must outlive it. */
stalled_driver *stalled_driver_create(const esper_driver *below);
void stalled_driver_destroy(stalled_driver *d);

/* The driver's functions, for a core to be made over. */
const esper_driver *stalled_driver_functions(stalled_driver *d);

/* From now on, what is recorded on the stream stays pending. 0: no host
 * memory. Stalling a stalled stream changes nothing. */
int stalled_driver_stall(stalled_driver *d, void *stream);

/* What was recorded on the stream while it was stalled may complete. */
void stalled_driver_release(stalled_driver *d, void *stream);

#endif
