/* pinned_memory.h: pinned host memory, for the bytes that one sleeper keeps. It consists of chunks.
 * It stays after the sleeper's pages woke, because pinning costs more time than copying. Under the
 * device's sleep lock. */
#ifndef ESPER_PINNED_MEMORY_H
#define ESPER_PINNED_MEMORY_H

#include "../core/order/device.h"

typedef struct pinned_chunk {
  char *memory;
  size_t size;
} pinned_chunk_t;

typedef struct pinned_memory {
  pinned_chunk_t *chunks;
  size_t count, capacity;
  size_t bytes; /* of all chunks */
} pinned_memory_t;

/* Makes it `bytes` large. Chunks that fit in stay. ESPER_HOST_MEMORY: there is not enough; no new
 * chunk was kept. */
esper_status pinned_memory_fit(pinned_memory_t *pinned, device_t *device, size_t bytes);

/* The address `offset` bytes into it. *most becomes the bytes from there to the end of the
 * chunk. */
char *pinned_memory_at(const pinned_memory_t *pinned, size_t offset, size_t *most);

/* Gives all of it back, unless the device has failed. */
void pinned_memory_free(pinned_memory_t *pinned, device_t *device);

#endif
