/* captures_world.h: what the tests of captures share: a world with streams that are captured, and
 * memory on them. The core is not told of the captures, as with CuPy. */
#ifndef ESPER_CAPTURES_WORLD_H
#define ESPER_CAPTURES_WORLD_H

#include "core/order/capture.h"
#include "one_world.h"

__attribute__((unused)) static esper_stream o;

enum { X = 12 * MIB, Y = 14 * MIB }; /* each has a segment of its own */

static inline void begin_with(const esper_config *config, size_t capacity)
{
  begin_on((sim_options){WHEN_TOLD, .capacity = capacity}, config);
  o = w.stream[3];
}

static inline void begin(void)
{
  begin_with(NULL, 0);
}

static inline presented_t present(esper_stream as)
{
  device_t *device;
  presented_t p;
  CHECK_OK(core_device(w.core, as.device, &device));
  CHECK_OK(stream_present(w.core, as, &p));
  return p;
}

static inline uint64_t capture_begin(void)
{
  return sim_capture_begin(w.s, 0, r.handle);
}

/* Ends it, replays the graph twice, and throws it away. */
static inline void capture_end(void)
{
  sim_graph *graph = captured(r);
  sim_graph_launch(w.s, graph, 0, o.handle);
  sim_graph_launch(w.s, graph, 0, o.handle);
  sim_run_all(w.s);
  sim_graph_destroy(w.s, graph);
}

#endif
