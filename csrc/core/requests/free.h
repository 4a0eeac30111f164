/* free.h: freeing a block. It waits for nothing but the pages of a fence, and fails only for an
 * address that is no live block. */
#ifndef ESPER_FREE_H
#define ESPER_FREE_H

#include "../base/types.h"

esper_status free_block(core_t *core, void *ptr);

#endif
