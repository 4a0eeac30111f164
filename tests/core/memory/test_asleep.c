/* Pages that sleep, in the books: what their free memory serves, and what the figures say. */
#include "core/memory/asleep.h"

#include "sleep/sleep_world.h"

static const segment_t *segment_of(const void *ptr)
{
  for (const segment_t *seg = first_segment(); seg; seg = seg->next)
    if ((uintptr_t)ptr >= seg->address && (uintptr_t)ptr < seg->address + seg->size)
      return seg;
  return NULL;
}

static block_state state_at(const void *ptr)
{
  const block_t *b = segment_of(ptr)->first;
  while (b->address != (uintptr_t)ptr)
    b = b->next;
  return (block_state)b->state;
}

SCENE(figures_follow_the_memory)
{
  void *p = used_as("weights", 20 * MIB, r);
  const segment_t *seg = segment_of(p);
  sleep_all_of("weights");
  CHECK_EQ(seg->asleep, 20 * MIB);
  CHECK_EQ(seg->absent, 20 * MIB);
  CHECK_EQ(seg->bytes, 20 * MIB);
  CHECK_EQ(reserved_mib(), 0);
  CHECK(page_at(seg, (uintptr_t)p)->asleep);
  CHECK_EQ(world_counters(&w, 0).bytes_asleep, 20 * MIB);
  wake("weights");
  CHECK_EQ(world_counters(&w, 0).bytes_asleep, 0);
  CHECK_EQ(world_counters(&w, 0).bytes_asleep_peak, 20 * MIB);
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  CHECK_EQ(world_counters(&w, 0).bytes_asleep_peak, 0);
  CHECK(!seg->asleep && !seg->absent);
  CHECK(!page_at(seg, (uintptr_t)p)->asleep);
  CHECK_EQ(reserved_mib(), 20);
}

SCENE(free_memory_beside_live_memory_sleeps_with_it)
{
  void *p = used_as("weights", 1024, r), *q = used_as("weights", 1024, r);
  world_free(&w, q);
  sleep_all_of("weights");
  CHECK_EQ(state_at(q), BLOCK_ASLEEP);
  CHECK_EQ(state_at(p), BLOCK_LIVE);
  world_check(&w);
  wake("weights");
  CHECK(get_as("weights", 1024, r) == q);
}
