/* peers.h: the devices that may access the pages of another one.
 *
 * Every mapping gives access to its device and to all peers of that; a peer that is
 * added gets every page that is mapped already. Pages are mapped, unmapped and moved
 * by many threads at a time, without the device's lock, under its paging lock, shared:
 * from before the driver is called until the books are made. Whoever adds a peer has
 * that lock alone, so pages are either mapped after it, or seen by it. */
#ifndef ESPER_PEERS_H
#define ESPER_PEERS_H

#include "../order/device.h"

/* Around whatever changes which pages are where. Taken without the device's lock, and
 * never twice. */
void paging_begin(device_t *device);
void paging_end(device_t *device);
/* Around whatever wants to see all pages, and needs them to stay. */
void paging_stop(device_t *device);
void paging_go_on(device_t *device);

/* Maps a page, for the device and its peers. Between paging_begin and paging_end. */
esper_status peers_map(const device_t *device, uintptr_t address, size_t size, uint64_t page);

/* Of what esper_add_peer() says. */
esper_status peers_add(device_t *device, int peer);

bool peers_has(device_t *device, int peer);

void peers_init(device_t *device);
void peers_destroy(device_t *device);

#endif
