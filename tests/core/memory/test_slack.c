/* New pages instead of moved ones, up to a 25th over the recent peak. */
#include "core/api/testing.h"
#include "core/base/lock.h"
#include "core/memory/slack.h"
#include "core/order/device.h"
#include "esper_sleep.h"
#include "pages_world.h"

/* Seven blocks of a page each, every other one free, the last one among them; and pages
 * have moved often. */
static void comb_after_many_moves(void)
{
  comb(20, 7, r);
  core_set_pages_moved(w.core, 256);
}

/* Where there is slack, this takes 2 MiB of it. */
static void a_page_moves_instead(void)
{
  uint64_t moved = world_counters(&w, 0).pages_moved;
  get(22, r);
  CHECK_EQ(reserved_mib(), 140);
  CHECK_EQ(world_counters(&w, 0).pages_moved, moved + 1);
}

SCENE(with_a_little_slack_nothing_moves)
{
  comb_after_many_moves();
  void *last = get(22, r);
  CHECK_EQ(reserved_mib(), 142);
  world_free(&w, last);
  last = get(24, r);
  CHECK_EQ(reserved_mib(), 144);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 256);
  world_free(&w, last);
  get(26, r); /* 6 MiB would be more than a 25th of 140 */
  CHECK_EQ(world_counters(&w, 0).pages_moved, 257);
  CHECK_EQ(reserved_mib(), 144);
}

/* On a device of 16 GiB or more. */
SCENE_WITH(a_small_programs_slack_is_two_large_pages, begin_with(16384, NULL))
{
  comb_after_many_moves();
  get(60, r);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 256);
  get(60, r);
  CHECK(world_counters(&w, 0).pages_moved > 256);
}

SCENE_WITH(pages_move_where_the_device_has_no_room, begin_with(140, NULL))
{
  comb_after_many_moves();
  a_page_moves_instead();
  CHECK_EQ(world_stats(&w, 0).num_alloc_retries, 0);
}

TEST(pages_move_where_requests_are_rejected)
{
  esper_config config = {.large_segment_size = 20 * MIB,
                         .rejection_share = 141.0 / 256,
                         .segments = ESPER_SEGMENTS_MAPPED};
  begin_with(256, &config);
  comb_after_many_moves();
  a_page_moves_instead();
  CHECK_EQ(world_stats(&w, 0).num_oom_rejections, 0);
  end();
}

/* A device that has no pages for slack is not asked for more until as many have moved again;
 * and that it had none does not say that the heap cannot grow. */
SCENE_WITH(a_device_without_room_is_asked_once, begin_with(140, NULL))
{
  comb_after_many_moves();
  world_free(&w, get(22, r));
  uint64_t asked = calls(SIM_CALL_page_create);
  CHECK_EQ(w.core->devices[0].refused, 0);
  world_free(&w, get(42, r));
  CHECK_EQ(world_counters(&w, 0).pages_moved, 258);
  CHECK_EQ(calls(SIM_CALL_page_create), asked);
  sim_set_capacity(w.s, 0, 256 * MIB);
  core_set_pages_moved(w.core, 511);
  world_free(&w, get(62, r)); /* the 512th moves */
  CHECK_EQ(reserved_mib(), 140);
  get(82, r);
  CHECK_EQ(reserved_mib(), 142);
}

/* What was the peak of active memory once says nothing of what is needed now. */
TEST(a_peak_of_long_ago_is_no_slack)
{
  enum { MOST_BLOCKS = 8192 };
  static struct {
    void *memory;
    size_t size;
  } live[MOST_BLOCKS];
  esper_config mapped = {.segments = ESPER_SEGMENTS_MAPPED};
  size_t count = 0, bytes = 0, top = 8192 * MIB;
  begin_with(65536, &mapped);
  core_set_pages_moved(w.core, 256);
  world_free(&w, get(30000, r));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  for (size_t size = 4 * MIB; size <= 256 * MIB; size *= 2) {
    for (; bytes + size <= top; bytes += size, count++) {
      live[count].memory = world_malloc(&w, size, r);
      live[count].size = size;
    }
    size_t kept = 0; /* every other one */
    for (size_t i = 0; i < count; i++) {
      if (i % 2)
        world_free(&w, live[i].memory), bytes -= live[i].size;
      else
        live[kept++] = live[i];
    }
    count = kept;
  }
  CHECK(reserved_mib() * 100 <= (int64_t)(top / MIB) * 105);
  end();
}

/* Memory that the private pool of a graph has free is nobody's slack. */
SCENE(an_idle_private_pool_takes_no_slack)
{
  world_free(&w, world_malloc_from(&w, world_pool(&w, 0, 0, 1), 60 * MIB, r));
  comb_after_many_moves();
  get(22, r);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 256);
  CHECK_EQ(reserved_mib(), 202);
}
