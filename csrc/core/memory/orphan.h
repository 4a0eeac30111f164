/* orphan.h: pages that are mapped nowhere, because the driver refused both to map them and to take
 * them back. They are tried again. Until then they count towards the memory fraction although they
 * are in no segment. */
#ifndef ESPER_ORPHAN_H
#define ESPER_ORPHAN_H

#include "../order/device.h"

struct orphan {
  uint64_t handle;
  size_t size; /* 0: the entry is empty */
  orphan_t *next;
};

/* An empty entry. NULL: no host memory. Under the lock. */
orphan_t *orphan_reserve(device_t *device);
/* Keeps the entry if it has a page, else gives it back. Under the lock. */
void orphan_keep(device_t *device, orphan_t *orphan);

/* Gives a page that is mapped nowhere back to the driver, or notes it in `orphan` if the driver
 * refuses. Without the lock. */
void orphan_release_page(device_t *device, uint64_t handle, size_t size, orphan_t *orphan);

/* Tries to give all of them back, and returns the bytes that went. Without the lock. */
size_t orphans_give_back(device_t *device);

bool orphans_are_valid(const device_t *device);

#endif
