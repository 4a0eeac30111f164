/* malloc.h: malloc. */
#ifndef ESPER_MALLOC_H
#define ESPER_MALLOC_H

#include "../blocks/block_cache.h"

/* `attempt`: what an attempt to take a block from the cache found out. All zero: there was none. */
esper_status malloc_block(pool_t *pool, size_t size, esper_stream stream, cache_attempt_t attempt,
                          void **ptr);

#endif
