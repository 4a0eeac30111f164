/* host_room.h: pinned host memory, for the bytes that one sleeper keeps. It consists of chunks, and
 * stays after the memory woke, because pinning costs more time than copying. Under the device's
 * sleep lock. */
#ifndef ESPER_HOST_ROOM_H
#define ESPER_HOST_ROOM_H

#include <stdatomic.h>

#include "../order/device.h"

typedef struct host_chunk {
  char *memory;
  size_t size;
} host_chunk_t;

typedef struct host_room {
  host_chunk_t *chunks;
  size_t count, room;
  atomic_size_t bytes; /* of all chunks; statistics read it meanwhile */
} host_room_t;

/* Makes the room `bytes` large. Chunks that fit in stay, and those that the driver does not take
 * back. ESPER_HOST_MEMORY: there is not enough; no new chunk was kept. */
esper_status host_room_fit(host_room_t *room, device_t *device, size_t bytes);

/* The place `offset` bytes into the room, of which *most bytes adjoin. */
char *host_room_at(const host_room_t *room, size_t offset, size_t *most);

/* Gives all of it back. False: the driver did not take all of it. */
bool host_room_free(host_room_t *room, device_t *device);

#endif
