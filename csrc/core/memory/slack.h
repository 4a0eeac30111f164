/* slack.h: a little more memory than is needed, so that growing takes few calls of the driver.
 *
 * Moving a page costs as much as creating one, and the page is then missing where it was. A program
 * with repeating requests and hardly any slack would move pages in every round, for ever. So
 * after many moves the heap creates new pages instead, until all pages together exceed the recent
 * peak of active memory by a small share. */
#ifndef ESPER_SLACK_H
#define ESPER_SLACK_H

#include "../base/types.h"

/* Only the default pool has slack: other pools keep their pages. */
bool slack_is_for(const pool_t *pool);

/* Whether `missing` bytes of pages may all be created, although some could move (`movable`).
 * May pause the block caches. */
bool slack_allows_new_pages(device_t *device, size_t missing, bool movable);

/* The device had no memory for slack or for a request. No new pages are created instead of
 * moved ones until many more pages have moved. */
void slack_was_refused(device_t *device);

/* The pool gave pages back to the driver, so slack begins anew. */
void slack_begin_anew(const pool_t *pool);

bool slack_is_valid(const device_t *device);

#endif
