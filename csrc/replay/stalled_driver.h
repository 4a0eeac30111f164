/* stalled_driver.h: a driver over another driver, with streams that can be stalled: they stay busy
 * until released.
 *
 * A recorded history tells up to which entry a stream was still reading some memory, but not what
 * the stream was doing. For the replay such a stream is stalled: what is recorded on it has not
 * completed until it is released, stall by stall in their order. Every call goes to the driver
 * below, so its costs are real; only answers about stalled work differ. A wait for stalled work, by
 * the host or a stream, releases it.
 *
 * Unlike other drivers this one can be used by one thread at a time only. */
#ifndef ESPER_STALLED_DRIVER_H
#define ESPER_STALLED_DRIVER_H

#include "../device/device.h"

typedef struct stalled_driver stalled_driver;

/* Makes one over `below`, which must outlive it. NULL: no host memory. */
stalled_driver *stalled_driver_create(const esper_driver *below);
void stalled_driver_destroy(stalled_driver *d);

/* The functions that a core can be made over. */
const esper_driver *stalled_driver_functions(stalled_driver *d);

/* Stalls a stream, once more if it is stalled: what is recorded on it from now on stays pending.
 * Returns the stall's number; 0: no host memory. */
uint64_t stalled_driver_stall(stalled_driver *d, void *stream);

/* Releases a stream from the stalls up to this one: what was recorded before the next one may
 * complete. */
void stalled_driver_release(stalled_driver *d, void *stream, uint64_t number);

#endif
