/* monotonic.h: a clock that never goes back, for waits that end after a while. */
#ifndef ESPER_MONOTONIC_H
#define ESPER_MONOTONIC_H

#include <stdint.h>

/* Microseconds since a fixed moment. */
uint64_t monotonic_now(void);
/* Stops the clock, and moves it on, for tests. */
void monotonic_skip(uint64_t microseconds);

#endif
