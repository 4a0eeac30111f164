/* failure.h: the thread's last failure, and libcuda's results as statuses. */
#ifndef ESPER_CUDA_FAILURE_H
#define ESPER_CUDA_FAILURE_H

#include <stdbool.h>

#include "../device.h"
#include "entry_points.h"

/* Bytes for a failure in words. */
enum { CUDA_FAILURE_TEXT = 320 };

/* Notes that a function of libcuda failed. */
esper_status cuda_fail(const char *function, CUresult result);

static inline esper_status cuda_check(const char *function, CUresult result)
{
  return result == CUDA_SUCCESS ? ESPER_OK : cuda_fail(function, result);
}

/* cuda_check(name, name(...)), so that messages name the right function. */
#define CALL(name, ...) cuda_check(#name, libcuda.name(__VA_ARGS__))

/* Notes a failure with a text of the driver layer's own. */
esper_status cuda_refuse(esper_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The calling thread's last failure, in words. */
const char *cuda_last_error(void *self);

/* What libcuda answered to this thread's last failed call. */
CUresult cuda_failed_with(void);

/* Whether a call failed for lack of a context. Without any, libcuda may refuse even a handle that
 * names its own. */
bool cuda_lacks_context(esper_status status);

#endif
