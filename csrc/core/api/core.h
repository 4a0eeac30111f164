/* core.h: the core as a whole: its devices, its life, its public functions. */
#ifndef ESPER_CORE_H
#define ESPER_CORE_H

#include "../base/types.h"

/* Another clock than the machine's: microseconds, above zero, never falling. For
 * tests and replays, before the core's first call. */
void core_set_clock(core_t *core, int64_t (*clock_us)(void));

/* For tests: as if so many pages had moved on each device. */
void core_set_pages_moved(core_t *core, uint64_t pages);

#endif
