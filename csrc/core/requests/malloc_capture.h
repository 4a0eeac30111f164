/* malloc_capture.h: malloc and free inside a capture. A use there ends at a point in the graph
 * instead of an event. malloc looks for the stream's own blocks whose points come before the
 * request's point, by the program's own edges. */
#ifndef ESPER_MALLOC_CAPTURE_H
#define ESPER_MALLOC_CAPTURE_H

#include "request.h"

/* Steps 2 and 3 of malloc; NULL: none. No lock is held. */
block_t *malloc_take_inside(const request_t *q);
/* Warns once, after a request ended a capture that it did not know of. */
void malloc_warn_of_ended_capture(core_t *core);

/* Sets what a claimed block owes after its free, if it was handed out inside a capture. The
 * device's lock is dropped meanwhile. False: the capture is over, or its user has left it. */
bool malloc_owe_inside(device_t *device, block_t *block);
/* Makes a block of an earlier capture one of the capture that its heap is in now. False: it may not
 * be reused there. Under the device's lock. */
bool block_join_capture(block_t *block);

#endif
