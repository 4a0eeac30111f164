/* core.h: the core as a whole: its devices, its life, its public functions. */
#ifndef ESPER_CORE_H
#define ESPER_CORE_H

#include "../base/types.h"

/* The device, set up at its first use. */
esper_status core_device(core_t *core, int index, device_t **device);
/* The same, or NULL where it was never used: what only looks, or gives back, finds nothing
 * there, and must not make the driver set the device up for this process. */
esper_status core_used_device(core_t *core, int index, device_t **device);
esper_status core_no_device(const core_t *core, int index);

/* Another clock than the machine's: microseconds, above zero, never falling. For
 * tests and replays, before the core's first call. */
void core_set_clock(core_t *core, int64_t (*clock_us)(void));

/* For tests: as if so many pages had moved on each device. */
void core_set_pages_moved(core_t *core, uint64_t pages);

#endif
