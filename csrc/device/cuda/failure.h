/* failure.h: the thread's last failure, and libcuda's results as statuses. */
#ifndef ESPER_CUDA_FAILURE_H
#define ESPER_CUDA_FAILURE_H

#include <stdbool.h>

#include "../device.h"
#include "entry_points.h"

/* Room for a failure in words. */
enum { CUDA_FAILURE_TEXT = 320 };

/* Notes that a function of libcuda failed. */
esper_status cuda_fail(const char *function, CUresult result);

static inline esper_status cuda_check(const char *function, CUresult result)
{
  return result == CUDA_SUCCESS ? ESPER_OK : cuda_fail(function, result);
}

/* cuda_check(name, name(...)), so that no message names the wrong function. */
#define CALL(name, ...) cuda_check(#name, libcuda.name(__VA_ARGS__))

/* Notes a failure in our own words. */
esper_status cuda_refuse(esper_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Of the calling thread. */
const char *cuda_last_error(void *self);

/* What libcuda answered when a call of this thread failed last. */
CUresult cuda_failed_with(void);

/* A thread that has no context at all may be refused even a handle that names
 * its own. */
bool cuda_lacks_context(esper_status status);

#endif
