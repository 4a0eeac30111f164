/* testing.h: what only tests and replays may set. */
#ifndef ESPER_TESTING_H
#define ESPER_TESTING_H

#include "../base/types.h"

/* Another clock than the machine's: microseconds, above zero, never falling. For
 * tests and replays, before the core's first call. */
void core_set_clock(core_t *core, int64_t (*clock_us)(void));

/* For tests: as if so many pages had moved on each device. */
void core_set_pages_moved(core_t *core, uint64_t pages);

#endif
