/* error.h: the calling thread's last failure, in words. */
#ifndef ESPER_ERROR_H
#define ESPER_ERROR_H

#include "types.h"

/* Stores the sentence and returns `status`. */
esper_status error_set(esper_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Makes the driver's last error the core's, and returns `status`. */
esper_status error_from_driver(const core_t *core, esper_status status);

#endif
