/* slack.h: a little more memory than is needed, so that pages come to rest.
 *
 * A page that moves costs as much as a new one, and is missed where it was. A program whose
 * requests come round again, in memory that is as tight as can be, moves pages in every round
 * and never stops. With a little slack most such programs soon do. So once many pages have
 * moved, new ones are made although others could be lent, until all pages are a small part
 * more than the recent peak of active memory.
 *
 * Under the device's lock. */
#ifndef ESPER_SLACK_H
#define ESPER_SLACK_H

#include "../base/types.h"

/* `missing` bytes of pages are about to be made, and some of them could be lent instead if
 * `lendable`. True: all are made. May pause the block caches. */
bool slack_take(device_t *device, size_t missing, bool lendable);

/* The device had no pages for slack, or none for a request: there is no slack until FEW_MOVES
 * more pages have moved. */
void slack_ran_out(device_t *device);

/* The pool gave pages back to the device, so there is slack to take again. */
void slack_given_back(const pool_t *pool);

bool slack_is_valid(const device_t *device);

#endif
