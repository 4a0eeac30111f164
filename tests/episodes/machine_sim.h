/* machine_sim.h: what only the simulated device can do, for episodes that run on it alone. */
#ifndef ESPER_TESTS_MACHINE_SIM_H
#define ESPER_TESTS_MACHINE_SIM_H

#include "device/sim/sim.h"
#include "machine.h"

/* The running program's device. */
sim *machine_sim(void);
/* How the next program's device is made; oracle, completion, seed and pages are as always. */
void machine_sim_next(sim_options options);

#endif
