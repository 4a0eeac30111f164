/* clock.h: vector clocks, which say what comes before what. */
#ifndef ESPER_SIM_CLOCK_H
#define ESPER_SIM_CLOCK_H

#include "state.h"

uint64_t sim_clock_get(const sim_clock *clock, uint32_t slot);
void sim_clock_set(sim *s, sim_clock *clock, uint32_t slot, uint64_t index);
void sim_clock_join(sim *s, sim_clock *clock, const sim_clock *other);
void sim_clock_copy(sim *s, sim_clock *clock, const sim_clock *other);
/* Makes the host come after everything that the clock stands for. */
void sim_host_learn(sim *s, const sim_clock *clock);

#endif
