/* device.h: one GPU, and how a call reaches it. */
#ifndef ESPER_DEVICE_STATE_H
#define ESPER_DEVICE_STATE_H

#include "../base/types.h"

/* The device, set up at its first use. */
esper_status core_device(core_t *core, int index, device_t **device);
/* The same, or NULL where it was never used: what only looks, or gives back, finds nothing
 * there, and must not make the driver set the device up for this process. */
esper_status core_used_device(core_t *core, int index, device_t **device);
esper_status core_no_device(const core_t *core, int index);

/* The share of the device's memory that the core may reserve; 1: all of it. */
esper_status device_set_limit(device_t *device, double fraction);

#endif
