/* loose.h: pages that are mapped nowhere, because the driver would neither map them nor
 * take them back. They are tried again, and until then count towards the memory
 * fraction, though they are in no segment. */
#ifndef ESPER_LOOSE_H
#define ESPER_LOOSE_H

#include "../order/device.h"

/* A page that the driver would neither map nor take back. */
struct loose {
  uint64_t handle;
  size_t size; /* 0: there is none */
  loose_t *next;
};

/* Room for one, of size 0. NULL: no host memory. Under the lock. */
loose_t *loose_take(device_t *device);
/* Keeps it if there is a page in it. Under the lock. */
void loose_settle(device_t *device, loose_t *loose);

/* Gives a page that is mapped nowhere back to the driver, or notes it in `loose`.
 * Without the lock. */
void loose_release(device_t *device, uint64_t handle, size_t size, loose_t *loose);

/* Tries all of them again: the bytes that went. Without the lock. */
size_t loose_give_back(device_t *device);

bool loose_is_valid(const device_t *device);

#endif
