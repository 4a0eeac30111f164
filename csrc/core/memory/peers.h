/* peers.h: the devices that may access another device's pages.
 *
 * Every mapping gives access to its device and all its peers. A new peer gets access to every page
 * that is already mapped. Threads that map, unmap or move pages hold the paging lock shared, from
 * before they call the driver until the page tables are updated, and not the device's lock. A
 * thread that adds a peer holds the paging lock alone, so no page is missed. */
#ifndef ESPER_PEERS_H
#define ESPER_PEERS_H

#include "../order/device.h"

/* Before whatever changes where pages are. Called without the device's lock, and never nested. */
void paging_begin(device_t *device);
/* Before whatever needs to see all pages and needs them to stay. */
void paging_stop(device_t *device);
/* After either of them. */
void paging_end(device_t *device);

/* See esper_add_peer(). */
esper_status peers_add(device_t *device, int peer);

bool peers_has(device_t *device, int peer);
/* Sets up the devices that are this device's peers. A peer may work on this device's memory without
 * having any of its own. Once it is set up, it is asked and waited for like any other. */
esper_status peers_start(device_t *device);

void peers_init(device_t *device);
void peers_destroy(device_t *device);

#endif
