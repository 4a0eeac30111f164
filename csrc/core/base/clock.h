/* clock.h: the time, for waits that end after a while. */
#ifndef ESPER_CLOCK_H
#define ESPER_CLOCK_H

#include <stdint.h>

/* Microseconds since some moment. */
uint64_t clock_now(void);
/* Moves the clock on, for tests. */
void clock_skip(uint64_t microseconds);

#endif
