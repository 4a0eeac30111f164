/* scope.h: what each call of device.h is made in. A scope makes the device's primary
 * context current and takes the thread out of the way of other people's captures, and
 * puts both back as they were. */
#ifndef ESPER_CUDA_SCOPE_H
#define ESPER_CUDA_SCOPE_H

#include <stdbool.h>

#include "devices.h"
#include "failure.h"

typedef enum scope_mode {
  SCOPE_PLAIN,  /* only the context: calls that no capture minds */
  SCOPE_RELAXED /* calls that a capture going on elsewhere would be broken by */
} scope_mode;

typedef struct cuda_scope {
  cuda_device *device;
  CUcontext context;
  bool pushed;
  bool relaxed;
  CUstreamCaptureMode mode; /* the thread's own, while relaxed */
} cuda_scope;

esper_status cuda_scope_enter(cuda_scope *s, int device, scope_mode mode);
/* Answers `status`. */
esper_status cuda_scope_leave(cuda_scope *s, esper_status status);
/* Where the device has no virtual memory management: ESPER_UNSUPPORTED. */
esper_status cuda_scope_enter_virtual(cuda_scope *s, int device);

/* The rest of a function that makes one driver call in a scope. */
#define RETURN_SCOPED(device, mode, call)                     \
  do {                                                        \
    cuda_scope s;                                             \
    esper_status status = cuda_scope_enter(&s, device, mode); \
    if (status != ESPER_OK)                                   \
      return status;                                          \
    return cuda_scope_leave(&s, call);                        \
  } while (0)

/* The same for a short call on a stream, which the scope would make half as
 * long again: a handle above 2 names its context itself, so the scope is
 * entered only for the others, and where the thread has no context. */
#define RETURN_ON_STREAM(device, stream, call)      \
  do {                                              \
    if ((uintptr_t)(stream) > 2) {                  \
      esper_status named = cuda_refuse_if_forked(); \
      if (named == ESPER_OK)                        \
        named = call;                               \
      if (!cuda_lacks_context(named))               \
        return named;                               \
    }                                               \
    RETURN_SCOPED(device, SCOPE_PLAIN, call);       \
  } while (0)

#endif
