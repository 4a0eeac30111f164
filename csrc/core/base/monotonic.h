/* monotonic.h: the time, for waits that end after a while. */
#ifndef ESPER_MONOTONIC_H
#define ESPER_MONOTONIC_H

#include <stdint.h>

/* Microseconds since some moment. */
uint64_t monotonic_now(void);
/* Moves the clock on, for tests. */
void monotonic_skip(uint64_t microseconds);

#endif
