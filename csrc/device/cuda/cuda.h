/* cuda.h: what the CUDA driver layer can tell about itself and the machine, beside the functions of
 * device.h. Nothing here creates a context on a device. */
#ifndef ESPER_CUDA_H
#define ESPER_CUDA_H

#include "../device.h"

/* The driver, loaded at first use. esper_cuda_driver() calls this and puts the reason of a failure
 * into esper_last_error(). ESPER_UNSUPPORTED: there is none. */
esper_status esper_cuda_open(const esper_driver **driver);

/* Why a function of this header last failed in the calling thread. */
const char *esper_cuda_last_error(void);

/* The driver's version, as 1000 * major + 10 * minor; 0 if there is no usable libcuda. */
int esper_cuda_driver_version(void);

/* The name of the library that is or would be opened. */
const char *esper_cuda_library(void);

/* The entry points that are looked up, in a fixed order. Returns 0 past the last. `version` is the
 * interface version asked for; `required`: nothing works without it; `found`: this driver has
 * it. */
typedef struct esper_cuda_entry_point {
  const char *name;
  int version;
  int required;
  int found;
} esper_cuda_entry_point;
int esper_cuda_get_entry_point(int index, esper_cuda_entry_point *entry);

typedef struct esper_cuda_device {
  char name[256];
  size_t total_bytes;
  int compute_capability[2];
  int virtual_memory; /* the device has virtual memory management */
} esper_cuda_device;
esper_status esper_cuda_get_device(int device, esper_cuda_device *info);

/* The device of a stream. Handles 0, 1 and 2 belong to the calling thread's current context. */
esper_status esper_cuda_stream_device(void *stream, int *device);

/* Nonzero in a child that was forked after CUDA was initialised here. CUDA does not work there, and
 * every function of the driver fails. */
int esper_cuda_is_forked(void);

#endif
