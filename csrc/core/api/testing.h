/* testing.h: settings for tests and replays only. */
#ifndef ESPER_TESTING_H
#define ESPER_TESTING_H

#include "../base/types.h"

/* Sets the number of pages that have moved on each device. */
void core_set_pages_moved(core_t *core, uint64_t pages);

#endif
