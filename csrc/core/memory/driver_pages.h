/* driver_pages.h: pages are created, mapped, unmapped and released. A device that has failed is
 * asked nothing: see failure.h. Without the device's lock, and under its growth lock where
 * addresses are concerned. */
#ifndef ESPER_DRIVER_PAGES_H
#define ESPER_DRIVER_PAGES_H

#include "../order/device.h"

/* ESPER_OUT_OF_MEMORY: the driver has no more. */
esper_status driver_page_create(const device_t *device, size_t size, uint64_t *page);

/* Maps a page for the device and its peers. */
esper_status driver_page_map(const device_t *device, uintptr_t address, size_t size, uint64_t page);

/* Creates a page and maps it. */
esper_status driver_page_add(device_t *device, uintptr_t address, size_t size, uint64_t *page);

/* These cannot be refused. */
void driver_page_unmap(device_t *device, uintptr_t address, size_t size);
void driver_page_release(device_t *device, uint64_t page);
void driver_range_free(device_t *device, uintptr_t address, size_t size);

#endif
