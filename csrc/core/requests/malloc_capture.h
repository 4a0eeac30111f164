/* malloc_capture.h: malloc and free inside a capture. What is freed there gets a place in the graph
 * instead of an event, and malloc looks for blocks whose places come before the request's, by the
 * program's own edges or by one that is added. */
#ifndef ESPER_MALLOC_CAPTURE_H
#define ESPER_MALLOC_CAPTURE_H

#include "request.h"

/* Steps 2 to 4 of malloc; NULL: none. No lock is held. */
block_t *malloc_find_inside(const request_t *q);
/* Step 7, when memory ran out. */
block_t *malloc_gate_inside(const request_t *q);

/* What a claimed block that was handed out inside a capture owes from now on; the device's lock is
 * dropped meanwhile. False: its capture is over, or it cannot be said what the block owes there. */
bool malloc_owe_inside(device_t *device, block_t *block);
/* A block of an earlier capture joins the one that its heap is in now. False: it may not. Under the
 * device's lock. */
bool block_joins_capture(block_t *block);

#endif
