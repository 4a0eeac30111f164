/* testing.h: settings for tests and replays only. */
#ifndef ESPER_TESTING_H
#define ESPER_TESTING_H

#include "../base/types.h"

/* Replaces the machine's clock. It gives microseconds, is above zero and never falls. To be set
 * before the core's first other call. */
void core_set_clock(core_t *core, int64_t (*clock_us)(void));

/* Sets the number of pages that have moved on each device. */
void core_set_pages_moved(core_t *core, uint64_t pages);

#endif
