/* malloc_fenced.h: malloc of memory with a fence (esper_fence), which is always new. */
#ifndef ESPER_MALLOC_FENCED_H
#define ESPER_MALLOC_FENCED_H

#include "request.h"

/* Steps 2 to 8 of malloc. NULL: *status says why. No lock is held. */
block_t *malloc_take_fenced(request_t *q, esper_status *status);

#endif
