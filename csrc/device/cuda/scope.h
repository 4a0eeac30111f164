/* scope.h: the scope in which each call of device.h is made. It makes the device's primary context
 * current, keeps the call from disturbing other people's captures, and restores both at the end. */
#ifndef ESPER_CUDA_SCOPE_H
#define ESPER_CUDA_SCOPE_H

#include <stdbool.h>

#include "devices.h"
#include "failure.h"

typedef enum scope_mode {
  SCOPE_PLAIN,  /* only the context: for calls that disturb no capture */
  SCOPE_RELAXED /* for calls that would invalidate a capture elsewhere */
} scope_mode;

typedef struct cuda_scope {
  cuda_device *device;
  CUcontext context;
  bool pushed;
  bool relaxed;
  CUstreamCaptureMode mode; /* the thread's own mode, while relaxed */
} cuda_scope;

esper_status cuda_scope_enter(cuda_scope *s, int device, scope_mode mode);
/* Returns `status`. */
esper_status cuda_scope_leave(cuda_scope *s, esper_status status);
/* ESPER_UNSUPPORTED if the device has no virtual memory management. */
esper_status cuda_scope_enter_virtual(cuda_scope *s, int device);

/* The body of a function that makes one driver call in a scope. */
#define RETURN_SCOPED(device, mode, call)                     \
  do {                                                        \
    cuda_scope s;                                             \
    esper_status status = cuda_scope_enter(&s, device, mode); \
    if (status != ESPER_OK)                                   \
      return status;                                          \
    return cuda_scope_leave(&s, call);                        \
  } while (0)

/* RETURN_SCOPED for a short call on a stream. A scope would make it half as long again. Handles
 * above 2 name their context, so the scope is entered only for the others, and if the thread has no
 * context. */
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
