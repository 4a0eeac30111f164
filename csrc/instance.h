/* instance.h: the one core of this process. */
#ifndef ESPER_INSTANCE_H
#define ESPER_INSTANCE_H

#include "esper_alloc.h"

/* The first call makes the core over the CUDA driver, configured from the environment. NULL: it
 * could not be made, and esper_last_error() says why; the next call tries again. The core lives
 * until the process ends, because destructors that run last may still give it memory back. */
esper_core *esper_instance(void);

/* How the core's mallocs wait: esper_config.while_waiting. Before the core is made. */
void esper_instance_waits(void (*how)(void (*wait)(void *argument), void *argument));

#endif
