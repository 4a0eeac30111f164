/* roles.h: what the tests of the rules and of the holes share: a world whose streams have roles. */
#ifndef ESPER_ROLES_H
#define ESPER_ROLES_H

#include "world.h"

__attribute__((unused)) static world w;
/* Streams by role: r owns and wants memory, s and t read, o is another one. */
__attribute__((unused)) static esper_stream r, s, t, o;

enum { X = 12, Y = 14, Z = 16 }; /* MiB: each has a segment of its own */

static inline void begin_roles(sim_options options, const esper_config *config)
{
  options.oracle = SIM_ORACLE_KNOWN;
  options.completion = SIM_WHEN_TOLD;
  world_begin_with(&w, &options, config);
  r = w.stream[0];
  s = w.stream[1];
  t = w.stream[2];
  o = w.stream[3];
}

static inline void end(void)
{
  world_end(&w);
}

/* Memory for a stream, with a kernel of that stream on it. */
static inline void *block(size_t mib, esper_stream stream)
{
  void *p = world_malloc(&w, mib * MIB, stream);
  world_kernel(&w, stream, p);
  return p;
}

/* A marked read of p, which `owner` wrote. */
static inline void read_and_mark(void *p, esper_stream owner, esper_stream reader)
{
  world_read_on(&w, reader, p, owner);
  world_use(&w, p, reader, 0);
}

#endif
