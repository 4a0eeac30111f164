/* capturing.h: whether a stream is being captured, or some stream of a device may be. */
#ifndef ESPER_CAPTURING_H
#define ESPER_CAPTURING_H

#include "stream.h"

/* The capture that the stream is in: 0 none; otherwise its id. Never asks the
 * driver for the legacy stream unless `recording`: it cannot be captured, but
 * recording on it can disturb the capture of another. */
uint64_t stream_capture_of(presented_t presented, bool recording);

/* Whether any stream of the device is, as far as they are known for ever. */
bool stream_any_is_captured(const device_t *device);

/* Whether a capture may be going on that allocates from a private pool. */
bool capturing_is_possible(const device_t *device);
/* The same for who does not hold the device's lock. */
bool capturing_is_possible_now(device_t *device);

#endif
