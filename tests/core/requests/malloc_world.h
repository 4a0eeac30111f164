/* malloc_world.h: what the tests of malloc share: a world of a given size and allowance, and
 * blocks that are pending. */
#ifndef ESPER_MALLOC_WORLD_H
#define ESPER_MALLOC_WORLD_H

#include "one_world.h"

static inline void begin_as(size_t capacity, size_t allowance, sim_completion completion)
{
  begin_on((sim_options){.oracle = SIM_ORACLE_KNOWN,
                         .completion = completion,
                         .capacity = capacity},
           &(esper_config){.allowance = allowance});
}

static inline void begin_with(size_t capacity, size_t allowance)
{
  begin_as(capacity, allowance, SIM_WHEN_TOLD);
}

static inline void begin(void)
{
  begin_with(1024 * MIB, ESPER_ALLOWANCE_OFF);
}

/* p was read on s, which has not got there yet, and is free. */
static inline void *pending(size_t size)
{
  void *p = block(size, r);
  read_and_free(p, s);
  return p;
}

#endif
