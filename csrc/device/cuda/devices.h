/* devices.h: the devices of this process, and their primary contexts. */
#ifndef ESPER_CUDA_DEVICES_H
#define ESPER_CUDA_DEVICES_H

#include <stdatomic.h>
#include <stdbool.h>

#include "../device.h"
#include "api.h"

/* Whether pages can be created so that another process can open them. The driver's answer (SAID)
 * counts only after it has created such a page (SEEN). */
enum sharing { SHARING_IS_REFUSED, SHARING_IS_SAID, SHARING_IS_SEEN };

typedef struct cuda_device {
  CUdevice handle;
  _Atomic(CUcontext) context; /* the primary context, retained at first use */
  bool virtual_memory;
  bool rdma; /* network cards can be given access to pages */
  _Atomic(enum sharing) sharing;
} cuda_device;

/* Written once, by load.c. */
extern cuda_device *cuda_devices;
extern int cuda_devices_seen;
extern int cuda_version; /* of the driver: 1000 * major + 10 * minor */

/* Finds a device by its number; fails in a forked child. */
esper_status cuda_device_find(int device, cuda_device **found);

/* Its primary context, retained at first use. */
esper_status cuda_device_retain(cuda_device *device, CUcontext *context);

/* From now on a fork is noticed. CUDA's state does not survive one. */
void cuda_watch_forks(void);
esper_status cuda_refuse_if_forked(void);

#endif
