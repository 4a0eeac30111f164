/* graph_pools.h: what the tests of private pools share: a world, filters, and captures into a pool
 * as torch.cuda.graph makes them. */
#ifndef ESPER_GRAPH_POOLS_H
#define ESPER_GRAPH_POOLS_H

#include "one_world.h"

enum { ID = 7 };

BEGIN(WHEN_TOLD, .devices = 2)

/* Filters: everything; nothing. */
static inline int all(void *context, void *stream)
{
  (void)stream;
  if (context)
    ++*(int *)context;
  return 1;
}

static inline int none(void *context, void *stream)
{
  (void)stream;
  ++*(int *)context;
  return 0;
}

static inline int references(uint64_t id)
{
  return esper_pool_use_count(w.core, 0, id, 0);
}

/* A capture on r into a pool, as torch.cuda.graph makes it. */
static inline void capture_begin(uint64_t id)
{
  CHECK_OK(esper_pool_begin(w.core, 0, id, 0, world_is_captured, &w));
  sim_capture_begin(w.s, 0, r.handle);
  sim_capture_group(w.s, 0, r.handle, id);
}

static inline sim_graph *capture_end(uint64_t id)
{
  sim_graph *graph = captured(r);
  CHECK_OK(esper_pool_end(w.core, 0, id, 0, NULL));
  return graph;
}

static inline void drop(sim_graph *graph, uint64_t id)
{
  sim_graph_destroy(w.s, graph);
  CHECK_OK(esper_pool_release(w.core, 0, id, 0));
}

#endif
