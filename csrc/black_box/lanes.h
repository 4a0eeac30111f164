/* lanes.h: numbers for (device, stream, pool). */
#ifndef ESPER_BLACK_BOX_LANES_H
#define ESPER_BLACK_BOX_LANES_H

#include <stdbool.h>

#include "format.h"

/* The number of one. The pool is {0, 0} but for segments. 0: there are too many. */
unsigned lane_of(int device, const void *stream, const uint64_t pool[2]);

/* Adds to the bytes that a lane's segments had before the events begin. With the box's lock
 * held. */
void lane_carry(unsigned lane, int64_t bytes);

/* How many there are, number 0 included, and each of them. */
unsigned lanes_count(void);
box_lane_item_t lane_item(unsigned lane);

bool lanes_are_valid(void);
/* Forgets the bytes. */
void lanes_forget(void);

#endif
