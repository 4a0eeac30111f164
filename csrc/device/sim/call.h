/* call.h: calls of the driver's functions: their number, faults and hooks. */
#ifndef ESPER_SIM_CALL_H
#define ESPER_SIM_CALL_H

#include "state.h"

void sim_calls_init(sim *s);
void sim_calls_destroy(sim *s);
/* Counts a call. Any status but ESPER_OK is a fault that the call must return at once. */
esper_status sim_call_count(sim *s, sim_call call);
/* Runs the hook before or after the function, if there is one. Without the lock. */
void sim_call_hook(sim *s, sim_call call, int after, int device, void *object);

#endif
