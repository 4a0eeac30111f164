/* heap_world.h: what the tests of heaps share: a world, and the heap of a stream. */
#ifndef ESPER_HEAP_WORLD_H
#define ESPER_HEAP_WORLD_H

#include "core/blocks/cache_latch.h"
#include "core/order/stream.h"
#include "core/pools/pool.h"
#include "one_world.h"

BEGIN(.completion = SIM_AT_ONCE)

/* The same with mapped segments, on a device of 256 MiB. */
static inline void begin_on_pages(void)
{
  begin_on((sim_options){.completion = SIM_AT_ONCE,
                         .oracle = SIM_ORACLE_KNOWN,
                         .virtual_memory = 1,
                         .capacity = 256 * MIB},
           NULL);
}

static inline stream_t *stream_of(esper_stream stream)
{
  return stream_immortal(w.core, &w.core->devices[stream.device], stream.handle);
}

/* Its heap of the default pool. */
static inline heap_t *heap_of(esper_stream stream)
{
  return pool_find_or_make_heap(w.core->devices[stream.device].default_pool, stream_of(stream), 0,
                                TAG_NONE);
}

/* Blocks in its cache; -1: it is not open. */
static inline int kept(esper_stream stream)
{
  block_cache_t *cache = &heap_of(stream)->cache;
  int count = 0;
  bool open = cache->state == CACHE_OPEN;
  cache_pause(cache);
  for (int i = 0; i < CACHE_SLOTS; i++)
    count += cache->count[i];
  cache_resume(cache);
  return open ? count : -1;
}

static inline esper_stats figures(void)
{
  return world_stats(&w, 0);
}

#endif
