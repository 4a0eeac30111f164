/* Which pages come back, and within which limits. */
#include "sleep/sleep_world.h"

SCENE(memory_can_be_freed_asleep_and_does_not_wake)
{
  void *p[4], *a = used_as("weights", 1024, r), *b = used_as("weights", 1024, r);
  for (int i = 0; i < 4; i++)
    p[i] = used_as("weights", 20 * MIB, r);
  sleep_all_of("weights");
  world_free(&w, p[1]);
  world_free(&w, p[2]);
  world_free(&w, a);
  world_check(&w);
  CHECK_STATUS(esper_free(w.core, p[1]), ESPER_INVALID);
  size_t woken;
  CHECK_OK(esper_wake(w.core, 0, NULL, 0, &woken));
  CHECK_EQ(woken, 40 * MIB + 2 * MIB);
  CHECK_EQ(reserved_mib(), 42);
  world_kernel(&w, s, p[0]);
  world_kernel(&w, s, p[3]);
  world_kernel(&w, s, b);
  world_check(&w);
  CHECK(get_as("weights", 1024, r) == a); /* free memory on a page that woke */
}

SCENE(a_wake_keeps_to_the_memory_fraction)
{
  used_as("weights", 40 * MIB, r);
  sleep_all_of("weights");
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.1));
  CHECK_STATUS(try_wake("weights"), ESPER_OUT_OF_MEMORY);
  CHECK(strstr(esper_last_error(), "memory fraction"));
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 1));
  wake("weights");
}

SCENE(what_was_freed_asleep_and_is_over_does_not_come_back)
{
  void *p = used_as("t", 20 * MIB, r);
  world_run(&w, r);
  CHECK_OK(esper_note_use(w.core, (const void *[]){p}, 1, s));
  sleep_all_of("t");
  world_free(&w, p);
  sim_run_all(w.s);
  wake("t");
  CHECK_EQ(alive().bytes, 0);
}

SCENE(a_pool_may_go_while_its_memory_sleeps)
{
  esper_pool *pool = world_pool(&w, 0, 7, 1);
  void *p[2];
  CHECK_OK(esper_tag_push("t"));
  for (int i = 0; i < 2; i++)
    p[i] = world_malloc_from(&w, pool, 20 * MIB, r);
  CHECK_OK(esper_tag_pop());
  sleep_all_of("t");
  world_free(&w, p[0]);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 1));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  world_check(&w);
  wake("t");
  world_kernel(&w, r, p[1]);
  world_check(&w);
  world_run(&w, r);
  world_free(&w, p[1]);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(alive().bytes, 0);
}
