/* peers.h: the devices that may access another device's pages.
 *
 * Every mapping gives access to its device and all its peers. A new peer gets access to every page
 * that is already mapped. A thread that maps, unmaps or moves pages holds the growth lock from
 * before it calls the driver until the page tables are updated, so no page is missed. */
#ifndef ESPER_PEERS_H
#define ESPER_PEERS_H

#include "../order/device.h"

/* See esper_add_peer(). */
esper_status peers_add(device_t *device, int peer);

bool peers_has(device_t *device, int peer);
/* Sets up the devices that are this device's peers. A peer may work on this device's memory without
 * having any of its own. Once it is set up, it is asked and waited for like any other. */
esper_status peers_start(device_t *device);

void peers_destroy(device_t *device);

#endif
