/* fake_cuda.h: how a test looks into fake_cuda.c, a libcuda made of nothing.
 * Found with dlsym, since the driver layer opens the library at run time. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>

/* The environment, read when the library is loaded:
 *   FAKE_CUDA_VERSION  driver version, 13000 when unset
 *   FAKE_CUDA_DEVICES  number of devices, 2 when unset
 *   FAKE_CUDA_LACKS    name of an entry point that is missing
 *   FAKE_CUDA_NO_VMM   set: devices without virtual memory management
 *   FAKE_CUDA_KEEPS    set: no page can be made that another process can open
 * Compiled with -DFAKE_CUDA_OLD_GET it has the old shape of cuGetProcAddress
 * only. */

enum { MAX_DEVICES = 8 };

typedef struct fake_control {
  /* The nth call of `function` from now on fails with `result`; a function is
   * "" to cancel. */
  void (*fail)(const char *function, int nth, int result);
  int (*calls)(const char *function); /* since the start */
  void (*set_current)(int device);    /* -1: the thread has no context */
  int (*current)(void);               /* device of the current context, or -1 */
  int (*depth)(void);                 /* contexts on the thread's stack */
  void (*set_mode)(int mode);         /* the thread's capture mode */
  int (*mode)(void);
  void *(*stream)(int device);
  /* status: 0 none, 1 active, 2 invalidated */
  void (*capture)(void *stream, int status, unsigned long long id);
  /* Captures an operation: its node, on which alone the next one depends. */
  void *(*node)(void *stream);
  /* Makes the stream's next operation depend on the node, too, as waiting for an event does. */
  void (*depend)(void *stream, void *node);
  void (*finish)(int on);            /* events complete at once (1), or never (0) */
  void (*finish_after)(int queries); /* events complete when that many questions were in vain */
  /* A capture was begun in global mode somewhere: unsafe calls in a thread that is not relaxed
   * fail, and are counted. */
  int capturing, unsafe_calls;
  int bad_requests;        /* lookups with wrong flags or a null symbol */
  int reach;               /* devices can access each other's memory */
  int access[MAX_DEVICES]; /* flags that were last set for each device */
  int live_mappings;
  size_t live_bytes;
} fake_control;

#endif
