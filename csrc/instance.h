/* instance.h: the one core of this process. */
#ifndef ESPER_INSTANCE_H
#define ESPER_INSTANCE_H

#include "esper_alloc.h"

/* Made by the first call, over the CUDA driver, with the configuration that
 * the environment gives. NULL: there is none, esper_last_error() says why;
 * asked again it tries again. It lives until the process ends: memory may be
 * given back to it by destructors that run last. */
esper_core *esper_instance(void);

#endif
