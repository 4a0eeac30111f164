/* streams_world.h: what the tests of streams and their records share: a world whose core has met
 * device 0, and streams as they are presented. */
#ifndef ESPER_STREAMS_WORLD_H
#define ESPER_STREAMS_WORLD_H

#include "core/order/record.h"
#include "core/order/stream.h"
#include "world.h"

static world w;
static device_t *device;

static inline void begin(void)
{
  world_begin(&w);
  world_free(&w, world_malloc(&w, 512, w.stream[0]));
  device = &w.core->devices[0];
}

static inline void end(void)
{
  world_end(&w);
}

__attribute__((unused)) static presented_t present(esper_stream as)
{
  presented_t p;
  CHECK_OK(stream_present(w.core, as, &p));
  return p;
}

__attribute__((unused)) static uint64_t queries(void)
{
  return sim_calls(w.s, SIM_CALL_event_query);
}

#endif
