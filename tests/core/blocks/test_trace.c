/* What the watcher is told. */
#include <stdbool.h>

#include "core/base/types.h"
#include "one_world.h"

BEGIN(WHEN_TOLD, .devices = 2, .capacity = 64 * MIB)

static told_t told;

SCENE(entries_name_their_pool)
{
  world_listen(&w, &told);
  void *p = world_malloc_from(&w, world_pool(&w, 0, 7, 9), 12 * MIB, r);
  world_malloc(&w, 512, r);
  world_free(&w, p);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 9));
  CHECK_OK(esper_pool_empty(w.core, 0, 7, 9));
  CHECK_EQ(told.count, 7);
  for (size_t i = 0; i < told.count; i++) {
    bool of_pool = i != 2 && i != 3; /* the small block and its segment */
    CHECK_EQ(told.entries[i].pool[0], of_pool ? 7 : 0);
    CHECK_EQ(told.entries[i].pool[1], of_pool ? 9 : 0);
  }
  CHECK_EQ(told.entries[6].action, ESPER_TRACE_SEGMENT_FREE);
}
