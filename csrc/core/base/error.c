#include "error.h"

#include <stdarg.h>
#include <stdio.h>

#include "core.h"

static _Thread_local char last_error[512];

esper_status error_set(esper_status status, const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

esper_status error_from_driver(const core_t *core, esper_status status)
{
  return error_set(status, "%s",
                   status == ESPER_SHUT_DOWN ? "CUDA has shut down, because the process ends"
                                             : core->driver->last_error(core->driver->self));
}

const char *esper_last_error(void)
{
  return last_error;
}

const char *esper_status_name(esper_status status)
{
  switch (status) {
  case ESPER_OK: return "ESPER_OK";
  case ESPER_NOT_READY: return "ESPER_NOT_READY";
  case ESPER_OUT_OF_MEMORY: return "ESPER_OUT_OF_MEMORY";
  case ESPER_INVALID: return "ESPER_INVALID";
  case ESPER_CAPTURING: return "ESPER_CAPTURING";
  case ESPER_UNSUPPORTED: return "ESPER_UNSUPPORTED";
  case ESPER_HOST_MEMORY: return "ESPER_HOST_MEMORY";
  case ESPER_DEVICE_ERROR: return "ESPER_DEVICE_ERROR";
  case ESPER_SHUT_DOWN: return "ESPER_SHUT_DOWN";
  case ESPER_REJECTED: return "ESPER_REJECTED";
  case ESPER_ASLEEP: return "ESPER_ASLEEP";
  }
  return "unknown esper_status";
}
