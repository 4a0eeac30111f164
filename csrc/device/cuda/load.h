/* load.h: libcuda is opened, and the devices are found, once a process. */
#ifndef ESPER_CUDA_LOAD_H
#define ESPER_CUDA_LOAD_H

#include "../device.h"

/* Every call answers as the first did. */
esper_status cuda_load(void);

#endif
