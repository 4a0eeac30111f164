/* base.h: the simulation's lock, its reports, and growing arrays. */
#ifndef ESPER_SIM_BASE_H
#define ESPER_SIM_BASE_H

#include "state.h"

void sim_enter(sim *s);
/* Unlocks, then calls the handler with what was reported. */
void sim_leave(sim *s);
void sim_report(sim *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Returns the status and sets the words for last_error(). */
esper_status sim_refuse(esper_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Why the calling thread's last call was refused. */
const char *sim_last_error(void);
uint64_t sim_random(uint64_t *state);
/* Makes an array large enough for one more element. Aborts if host memory runs out, because a test
 * cannot go on. */
void *sim_grow(void *array, size_t count, size_t *capacity, size_t size);
void *sim_grow32(void *array, uint32_t count, uint32_t *capacity, size_t size);

#endif
