/* malloc of memory with a fence: what makes room for it. */
#include "memory/pages_world.h"

SCENE_WITH(a_short_device_waits_for_freed_memory, begin_fenced(8))
{
  for (int i = 0; i < 20; i++)
    world_free(&w, used(3, r)); /* two pages: the third must wait for the first */
  world_check(&w);
  CHECK_STATUS(try_malloc(16 * MIB, r), ESPER_OUT_OF_MEMORY);
}

SCENE_WITH(what_was_cached_makes_room, begin_with(24, NULL))
{
  world_free(&w, used(20, r));
  CHECK_OK(esper_fence(w.core, 1));
  char *p = get(20, r);
  CHECK(is_fenced(p));
}

static void *victim;

static int free_victim(void *context, int short_of_memory)
{
  void *p = victim;
  CHECK(short_of_memory);
  victim = NULL;
  if (!p)
    return 0;
  world_free(context, p); /* no lock of the core's is held */
  return 1;
}

SCENE_WITH(memory_that_the_callback_frees_serves, begin_fenced(24))
{
  esper_config config = {.large_segment_size = 20 * MIB,
                         .segments = ESPER_SEGMENTS_MAPPED,
                         .free_memory = free_victim,
                         .free_memory_context = &w};
  CHECK_OK(esper_configure(w.core, &config));
  victim = get(20, r);
  sim_run_all(w.s);
  CHECK(is_fenced(get(20, r)));
  CHECK(!victim);
  CHECK_STATUS(try_malloc(20 * MIB, r), ESPER_OUT_OF_MEMORY);
}
