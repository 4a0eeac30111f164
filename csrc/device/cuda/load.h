/* load.h: opens libcuda and finds the devices, once in a process. */
#ifndef ESPER_CUDA_LOAD_H
#define ESPER_CUDA_LOAD_H

#include "../device.h"

/* The first call does the work; later ones return the same status. */
esper_status cuda_load(void);

#endif
