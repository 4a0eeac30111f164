/* failure.c: the thread's last failure, with libcuda's words for it. */
#include "failure.h"

#include <stdarg.h>
#include <stdio.h>

/* The thread's last failure. It is put into words only on demand, because "not ready" is a frequent
 * answer. */
static _Thread_local struct {
  const char *function; /* NULL: `text` says everything */
  CUresult result;
  char text[CUDA_FAILURE_TEXT];
} failure;

static esper_status status_of(CUresult result)
{
  switch (result) {
  case CUDA_SUCCESS: return ESPER_OK;
  case CUDA_ERROR_NOT_READY: return ESPER_NOT_READY;
  case CUDA_ERROR_OUT_OF_MEMORY: return ESPER_OUT_OF_MEMORY;
  case CUDA_ERROR_DEINITIALIZED:
  case CUDA_ERROR_CONTEXT_IS_DESTROYED: return ESPER_SHUT_DOWN;
  case CUDA_ERROR_NOT_SUPPORTED: return ESPER_UNSUPPORTED;
  default:
    return result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
                   result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
               ? ESPER_CAPTURING
               : ESPER_DEVICE_ERROR;
  }
}

esper_status cuda_fail(const char *function, CUresult result)
{
  failure.function = function;
  failure.result = result;
  return status_of(result);
}

esper_status cuda_refuse(esper_status status, const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  failure.function = NULL;
  vsnprintf(failure.text, sizeof failure.text, format, arguments);
  va_end(arguments);
  return status;
}

const char *cuda_last_error(void *self)
{
  (void)self;
  if (failure.function) {
    const char *name = NULL, *meaning = NULL;
    libcuda.cuGetErrorName(failure.result, &name);
    libcuda.cuGetErrorString(failure.result, &meaning);
    if (name)
      snprintf(failure.text, sizeof failure.text, "%s: %s (%s)", failure.function, name,
               meaning ? meaning : "no description");
    else
      snprintf(failure.text, sizeof failure.text, "%s: CUDA error %d", failure.function,
               failure.result);
    failure.function = NULL;
  }
  return failure.text[0] ? failure.text : "no error";
}

CUresult cuda_failed_with(void)
{
  return failure.result;
}

bool cuda_lacks_context(esper_status status)
{
  return status == ESPER_DEVICE_ERROR && failure.result == CUDA_ERROR_INVALID_CONTEXT;
}
