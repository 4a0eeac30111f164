/* Memory of different tags: it shares no page, free memory serves its own tag only, and whole pages
 * move. */
#include "sleep/sleep_world.h"

SCENE(free_memory_serves_its_own_tag)
{
  void *p = get_as("weights", 4 * MIB, r);
  world_free(&w, p);
  CHECK(get(4, r) != p);
  CHECK_EQ(stats_of("weights").allocated, 0);
  CHECK(get_as("weights", 4 * MIB, r) == p);
}

SCENE_WITH(whole_pages_move_between_tags, begin_with(64, NULL))
{
  void *p = get_as("weights", 40 * MIB, r);
  world_free(&w, p);
  CHECK(get_as("kv", 40 * MIB, r)); /* more than is left */
  CHECK(world_counters(&w, 0).pages_moved > 0);
}

SCENE(figures_are_by_tag)
{
  esper_tag_stats *tags;
  size_t count;
  CHECK_OK(esper_get_tag_stats(w.core, 0, &tags, &count));
  free(tags);
  CHECK_EQ(count, 0);
  get(4, r);
  void *p = get_as("weights", 20 * MIB, r);
  get_as("weights", 20 * MIB, s);
  world_free(&w, p);
  CHECK_OK(esper_get_tag_stats(w.core, 0, &tags, &count));
  CHECK_EQ(count, 2);
  CHECK(!strcmp(tags[0].name, "") && !strcmp(tags[1].name, "weights"));
  CHECK_EQ(tags[0].allocated, 4 * MIB);
  CHECK_EQ(tags[1].allocated, 20 * MIB);
  CHECK_EQ(tags[1].reserved, 40 * MIB);
  CHECK_EQ(tags[0].reserved + tags[1].reserved, reserved_mib() * (int64_t)MIB);
  free(tags);
  CHECK_STATUS(esper_get_tag_stats(w.core, 7, &tags, &count), ESPER_INVALID);
  CHECK(!tags && !count);
}

SCENE(a_pool_tells_how_much_of_it_sleeps)
{
  world_malloc_from(&w, world_pool(&w, 0, 5, 6), 20 * MIB, r);
  CHECK_EQ(esper_pool_asleep(w.core, 0, 5, 6), 0);
  CHECK_OK(esper_sleep(w.core, -1, NULL, 0, ESPER_KEEP_HOST, NULL));
  CHECK_EQ(esper_pool_asleep(w.core, -1, 5, 6), 20 * MIB);
  CHECK_EQ(esper_pool_asleep(w.core, 0, 5, 7), 0);
  CHECK_OK(esper_wake(w.core, -1, NULL, 0, NULL));
  CHECK_EQ(esper_pool_asleep(w.core, -1, 5, 6), 0);
}
