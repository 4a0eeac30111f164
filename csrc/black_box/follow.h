/* follow.h: tells another process, again and again, what is new in the black box. */
#ifndef ESPER_BLACK_BOX_FOLLOW_H
#define ESPER_BLACK_BOX_FOLLOW_H

#include <stdint.h>

/* Writes to a socket what happened after `since` (ticks; 0: all that is known) and until now, and
 * the places from number `first_site` on. It has the form of a file, with
 * - the header's `why`: "whole": forget what was told before; "since": add it to that;
 * - the header's `end_ticks`: the time until which it tells. A thread that is interrupted between
 *   reading the clock and writing its event tells of it late. So the next `since` is a second
 *   before that time: an event may be told twice;
 * - "LATE" near the end: parts were overwritten meanwhile. Ask for all.
 *
 * Threads that record wait at most for a copy of one chunk, or a walk over the list of all. The
 * reader may be slow: nothing is held while it is written to. Returns 0, or an errno. */
int box_follow(int socket, uint64_t since, unsigned first_site);

#endif
