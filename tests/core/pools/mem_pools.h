/* mem_pools.h: what the tests of MemPools share: a world with a pool, and an allocator for it. */
#ifndef ESPER_MEM_POOLS_H
#define ESPER_MEM_POOLS_H

#include "one_world.h"

__attribute__((unused)) static esper_pool *pool;

enum { ID = 5 };

/* An allocator that asks the simulated driver, so the oracle judges it too. */
typedef struct own {
  int live, dropped;
  esper_status answer; /* when not ESPER_OK */
  size_t shift;        /* of the addresses it gives */
} own;
static own o;

static inline esper_status own_obtain(void *context, int device, size_t size, void **address)
{
  own *of = context;
  const esper_driver *driver = sim_driver(w.s);
  uintptr_t at;
  if (of->answer != ESPER_OK)
    return of->answer;
  /* No lock is held. */
  CHECK_EQ(esper_pool_use_count(w.core, device, 99, 99), 0);
  if (driver->memory_alloc(driver->self, device, size, &at) != ESPER_OK)
    return ESPER_OUT_OF_MEMORY;
  of->live++;
  *address = (void *)(at + of->shift);
  return ESPER_OK;
}

static inline void own_give_back(void *context, int device, void *address, size_t size)
{
  own *of = context;
  const esper_driver *driver = sim_driver(w.s);
  CHECK(size > 0);
  CHECK_EQ(esper_pool_use_count(w.core, device, 99, 99), 0);
  CHECK_OK(driver->memory_free(driver->self, device, (uintptr_t)address - of->shift));
  of->live--;
}

static inline void own_drop(void *context)
{
  CHECK_EQ(((own *)context)->live, 0);
  CHECK_EQ(esper_pool_use_count(w.core, 0, 99, 99), 0);
  ((own *)context)->dropped++;
}

static const esper_source SOURCE = {own_obtain, own_give_back, own_drop, &o};

static inline void begin(size_t mib)
{
  begin_of(mib);
  o = (own){0};
  pool = world_pool(&w, 0, 0, ID);
}

static inline void *get(size_t size, esper_stream stream)
{
  return world_malloc_from(&w, pool, size, stream);
}

static inline void use_own(void)
{
  CHECK_OK(esper_pool_set_source(w.core, 0, 0, ID, &SOURCE));
}

static inline void set(unsigned flags)
{
  CHECK_OK(esper_pool_set_flags(w.core, 0, 0, ID, flags, flags));
}

static inline void release(void)
{
  CHECK_OK(esper_pool_release(w.core, 0, 0, ID));
}

#endif
