/* slack.h: a little more memory than is needed, so that pages stop moving.
 *
 * Moving a page costs as much as creating one, and the page is then missing where it was. A program
 * with repeating requests and hardly any spare memory would move pages in every round, for ever. A
 * little slack ends that for most programs. So after many moves, new pages are created although
 * others could be lent, until all pages together exceed the recent peak of active memory by a small
 * share. */
#ifndef ESPER_SLACK_H
#define ESPER_SLACK_H

#include "../base/types.h"

/* Asks whether `missing` bytes of pages may all be created, although some could be lent
 * (`lendable`). May pause the block caches. */
bool slack_take(device_t *device, size_t missing, bool lendable);

/* The device had no memory for slack or for a request: there is no slack until FEW_MOVES more pages
 * have moved. */
void slack_ran_out(device_t *device);

/* The pool gave pages back to the device, so slack starts anew. */
void slack_given_back(const pool_t *pool);

bool slack_is_valid(const device_t *device);

#endif
