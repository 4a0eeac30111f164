/* failure.h: a device that has failed.
 *
 * "No memory" is an answer, and the caller undoes its work. A driver that refuses to take memory
 * back, or to copy memory that goes to sleep or wakes, has failed, usually because of an error in a
 * kernel, and nothing that it says later can be relied on. So the device is marked. Its memory
 * counts as gone, nothing is handed out from then on, and every request says why. */
#ifndef ESPER_FAILURE_H
#define ESPER_FAILURE_H

#include "../order/device.h"

/* Marks the device as failed, with the driver's words, unless the status is ESPER_OK. Without the
 * device's lock. */
void failure_note(device_t *device, esper_status status);

/* ESPER_DEVICE_ERROR, in words, if the device has failed. */
esper_status failure_check(const device_t *device);

#endif
