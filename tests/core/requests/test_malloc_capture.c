/* malloc and free inside a capture: marks, frees and reuse by nodes of the graph. */
#include "core/requests/malloc_capture.h"

#include "core/base/arena.h"
#include "order/captures_world.h"

static int on_r(void *context, void *stream)
{
  (void)context;
  return stream == r.handle;
}

/* Inside a capture nobody waits and nothing goes back; the next request that fits
 * is served, and the graph is whole. */
SCENE_WITH(a_capture_survives_being_out_of_memory, begin_with(NULL, 44 * MIB))
{
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, on_r, NULL));
  sim_capture_begin(w.s, 0, r.handle);
  void *a = block(12 * MIB, r);
  CHECK_STATUS(try_malloc(40 * MIB, r), ESPER_OUT_OF_MEMORY);
  CHECK(sim_capture_is_valid(w.s, 0, r.handle));
  world_free(&w, a);
  CHECK_EQ(world_malloc(&w, 12 * MIB, r) == a, 1);
  world_kernel(&w, r, a);
  void *b = block(32 * MIB, r);
  sim_graph *graph = captured(r);
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
  CHECK_STATUS(try_malloc(12 * MIB, r), ESPER_OUT_OF_MEMORY);
  sim_graph_launch(w.s, graph, 0, s.handle);
  sim_graph_destroy(w.s, graph);
  world_free(&w, a);
  world_free(&w, b);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
  world_malloc(&w, 40 * MIB, s); /* all of it came back */
}
