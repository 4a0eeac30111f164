/* find.h: from an address to the live block around it. */
#ifndef ESPER_FIND_H
#define ESPER_FIND_H

#include "../base/types.h"

/* Finds the live block around an address, and leaves its device's lock held. NULL: there is none,
 * and no lock is held. */
block_t *find_lock_live(core_t *core, const void *ptr);

#endif
