/* The free blocks of a heap: which of them are ready, which one is taken, and what the heap's block
 * cache keeps. */
#include "core/blocks/free_blocks.h"

#include "core/base/config.h"
#include "made_blocks.h"

static void add(int first, int last)
{
  for (int i = first; i <= last; i++)
    free_blocks_add(made[i]);
}

/* ---- which one is taken --------------------------------------------------------- */

TEST(the_best_of_the_ready_blocks_is_the_smallest_that_is_large_enough)
{
  BEGIN_MADE(12, 4, 8, 4, 4, 4);
  add(0, 0); /* 12 */
  add(2, 2); /* 8 */
  add(4, 4); /* 4 */
  CHECK(free_blocks_best_ready(heap, 512, false) == made[4]);
  CHECK(free_blocks_best_ready(heap, 4 * KIB, false) == made[4]);
  CHECK(free_blocks_best_ready(heap, 4 * KIB + 512, false) == made[2]);
  CHECK(free_blocks_best_ready(heap, 12 * KIB, false) == made[0]);
  CHECK(!free_blocks_best_ready(heap, 12 * KIB + 512, false));
  CHECK(!free_blocks_best_ready(heap, 4 * KIB, true)); /* of the other size class */
  free_blocks_claim(made[4]);
  CHECK_EQ(made[4]->state, BLOCK_CLAIMED);
  CHECK(free_blocks_best_ready(heap, 512, false) == made[2]);
  end_made();
}

/* ---- the heap's cache ---------------------------------------------------------- */

SCENE(many_blocks_of_a_size_are_kept_and_then_none)
{
  enum { MANY = 200 };
  void *p[MANY];
  for (int i = 0; i < MANY; i++)
    p[i] = world_malloc(&w, 512, r);
  for (int i = 0; i < MANY; i++) {
    world_free(&w, p[i]);
    CHECK(kept(r) >= 1 && kept(r) <= CACHE_DEPTH);
    CHECK(esper_core_is_valid(w.core));
  }
}

SCENE(a_marked_block_a_lent_one_and_a_captured_one_are_not_kept)
{
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 12 * MIB, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  CHECK_EQ(kept(r), 0);
  world_free(&w, q);
  CHECK_EQ(kept(r), 1);
  void *a = world_malloc(&w, 2 * MIB, r), *b = world_malloc(&w, 2 * MIB, r);
  world_free(&w, a);
  esper_retire(w.core, 0);
  esper_set_memory_fraction(w.core, 0, 0.001);
  CHECK(world_malloc(&w, 2 * MIB, s) == a);
  world_free(&w, a);
  CHECK(kept(r) <= 0);
  world_free(&w, b);
}

SCENE(who_listens_misses_no_action)
{
  void *p = world_malloc(&w, MIB, r);
  world_free(&w, p);
  static told_t told;
  world_listen(&w, &told);
  for (int i = 0; i < 3; i++) {
    p = world_malloc(&w, MIB, r);
    world_free(&w, p);
    CHECK_EQ(kept(r), -1);
  }
  CHECK_EQ(told.count, 9); /* alloc, free_requested, free_completed */
  world_listen(&w, NULL);
  p = world_malloc(&w, MIB, r);
  world_free(&w, p);
  CHECK_EQ(told.count, 9);
  CHECK_EQ(kept(r), 1);
}
