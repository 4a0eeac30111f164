/* slack.h: a little more memory than is needed, so that pages come to rest.
 *
 * A page that moves costs as much as a new one, and is missed where it was. Where memory is
 * as tight as can be, programs whose requests come round again move pages in every round,
 * and never stop; with a little room most of them soon do. So once many pages have moved,
 * new ones are made although others could be lent. What is made so is a small part of the
 * pages that had to be made: the peak of active memory alone may be one of long ago.
 *
 * Under the device's lock. */
#ifndef ESPER_SLACK_H
#define ESPER_SLACK_H

#include "../base/types.h"

/* `missing` bytes of pages are about to be made. Whether that is without lending, although
 * `spared` of them could be lent: then so much room is taken. May pause the fronts. */
bool room_take(device_t *device, size_t missing, size_t spared);

/* They were not made after all. */
void room_leave(device_t *device, size_t spared);

/* The device had no pages for room, or none for a request: there is none until as many
 * pages as at first have moved again. */
void room_ran_out(device_t *device);

/* Pages of the pool went back to the device: those that were made for room first. */
void room_give_back(const pool_t *pool, size_t bytes);

bool room_is_valid(const device_t *device);

#endif
