/* malloc.h: malloc and free. */
#ifndef ESPER_MALLOC_H
#define ESPER_MALLOC_H

#include "../blocks/block_cache.h"

/* `try`: what the front of the stream's heap found out; all zero: it was not asked. */
esper_status malloc_block(pool_t *pool, size_t size, esper_stream stream, cache_attempt_t try,
                          void **ptr);
esper_status free_block(core_t *core, void *ptr);

/* Gives wholly free segments that owe nothing back to the driver, those of one pool or (NULL) of
 * all, until at least `enough` bytes were given back. `mind_captures`: but the default pool's while
 * a capture goes on. */
size_t release_cached(device_t *device, const pool_t *pool, bool mind_captures, size_t enough);

/* Before the device's memory grows: where a garbage_collection_threshold is exceeded, large cached
 * segments go back that were not used for as long as they are on average, or longer. */
void release_old(device_t *device);

#endif
