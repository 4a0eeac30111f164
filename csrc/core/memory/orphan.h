/* orphan.h: pages that are mapped nowhere, because the driver would neither map them nor
 * take them back. They are tried again, and until then count towards the memory
 * fraction, though they are in no segment. */
#ifndef ESPER_ORPHAN_H
#define ESPER_ORPHAN_H

#include "../order/device.h"

/* A page that the driver would neither map nor take back. */
struct orphan {
  uint64_t handle;
  size_t size; /* 0: there is none */
  orphan_t *next;
};

/* Room for one, of size 0. NULL: no host memory. Under the lock. */
orphan_t *orphan_reserve(device_t *device);
/* Keeps it if there is a page in it. Under the lock. */
void orphan_keep(device_t *device, orphan_t *orphan);

/* Gives a page that is mapped nowhere back to the driver, or notes it in `orphan`.
 * Without the lock. */
void orphan_release_page(device_t *device, uint64_t handle, size_t size, orphan_t *orphan);

/* Tries all of them again: the bytes that went. Without the lock. */
size_t orphans_give_back(device_t *device);

bool orphans_are_valid(const device_t *device);

#endif
