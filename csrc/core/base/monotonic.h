/* monotonic.h: a clock that never goes back, for waits that end after a while. */
#ifndef ESPER_MONOTONIC_H
#define ESPER_MONOTONIC_H

#include <stdint.h>

/* Microseconds since a fixed moment. */
uint64_t monotonic_now(void);
/* For tests: moves the clock on; stops it, so that from then on only monotonic_skip() moves it. */
void monotonic_skip(uint64_t microseconds);
void monotonic_stop(void);

#endif
