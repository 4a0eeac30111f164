/* pool.h: pools, and the heaps in them. Under the device's lock. */
#ifndef ESPER_POOL_H
#define ESPER_POOL_H

#include "types.h"

void pool_init(pool_t *pool, device_t *device, uint64_t id_first, uint64_t id_second);

/* The heap of (pool, stream, capture), made if need be. NULL: no host memory. */
heap_t *pool_heap(pool_t *pool, stream_t *stream, uint64_t capture);
void pool_destroy_heaps(pool_t *pool);

bool heap_is_valid(const heap_t *heap);

#endif
