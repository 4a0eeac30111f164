/* devices.h: the devices of this process, and their primary contexts. */
#ifndef ESPER_CUDA_DEVICES_H
#define ESPER_CUDA_DEVICES_H

#include <stdatomic.h>
#include <stdbool.h>

#include "../device.h"
#include "api.h"

/* Whether pages can be made so that another process can open them. The driver's word is
 * believed when it has made one. */
enum sharing { SHARING_IS_REFUSED, SHARING_IS_SAID, SHARING_IS_SEEN };

typedef struct cuda_device {
  CUdevice handle;
  _Atomic(CUcontext) context; /* the primary one, retained at first use */
  bool virtual_memory;
  bool rdma; /* pages can be made readable by network cards */
  _Atomic(enum sharing) sharing;
} cuda_device;

/* Written once, by load.c. */
extern cuda_device *cuda_devices;
extern int cuda_devices_seen;
extern int cuda_version; /* the driver's: 1000 * major + 10 * minor */

/* The device of that number, unless this is a forked child. */
esper_status cuda_device_find(int device, cuda_device **found);

/* Its primary context, retained at first use. */
esper_status cuda_device_retain(cuda_device *device, CUcontext *context);

/* CUDA's state does not survive a fork from here on. */
void cuda_watch_forks(void);
esper_status cuda_refuse_if_forked(void);

#endif
