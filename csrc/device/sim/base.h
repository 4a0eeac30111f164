/* base.h: the simulation's lock, its reports, and room in arrays. */
#ifndef ESPER_SIM_BASE_H
#define ESPER_SIM_BASE_H

#include "state.h"

void sim_enter(sim *s);
/* Unlocks, then tells the handler of what was reported. */
void sim_leave(sim *s);
void sim_report(sim *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A status with words for last_error(). */
esper_status sim_refuse(esper_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* What the calling thread was last refused for. */
const char *sim_last_error(void);
uint64_t sim_random(uint64_t *state);
/* Room for one more element. Host memory running out aborts: a test cannot
 * go on. */
void *sim_grow(void *array, size_t count, size_t *capacity, size_t size);
void *sim_grow32(void *array, uint32_t count, uint32_t *capacity, size_t size);

#endif
