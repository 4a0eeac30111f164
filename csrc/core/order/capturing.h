/* capturing.h: whether a stream is being captured, or whether some stream of a device may be. */
#ifndef ESPER_CAPTURING_H
#define ESPER_CAPTURING_H

#include "stream.h"

/* The id of the stream's capture; 0: none; or CAPTURE_UNKNOWN or ESPER_CAPTURE_INVALID. The legacy
 * stream cannot be captured, so the driver is asked about it only if `recording`: that can disturb
 * the capture of another stream. */
uint64_t stream_capture_of(presented_t presented, bool recording);

/* Whether any immortal stream of the device is captured. Others cannot be asked. */
bool stream_any_is_captured(const device_t *device);

/* The same, or a mortal stream was captured when it was last presented. */
bool stream_any_may_be_captured(const device_t *device);
/* Forgets that mortal streams were captured. */
void stream_forget_captures(const device_t *device);

/* Whether a capture was announced and goes on. */
bool capturing_is_announced(device_t *device);
/* The same, or a capture that allocates from a private pool may be going on. Under the device's
 * lock. */
bool capturing_is_possible(const device_t *device);
/* As capturing_is_possible, for a caller who does not hold that lock. */
bool capturing_is_possible_now(device_t *device);

#endif
