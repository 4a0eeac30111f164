/* The free blocks of a heap: which of them are ready, which one is taken, and what the heap's block
 * cache keeps. */
#include "core/blocks/free_blocks.h"

#include "core/base/config.h"
#include "made_blocks.h"

static void add(int first, int last)
{
  for (int i = first; i <= last; i++)
    free_blocks_add(block[i]);
}

/* ---- ready and pending -------------------------------------------------------- */

TEST(ready_neighbours_merge)
{
  BEGIN_MADE(4, 8, 4, 8);
  add(0, 0);
  add(2, 2);
  CHECK_EQ(heap->ready[0].count, 2);
  add(1, 1); /* between the two */
  CHECK_EQ(heap->ready[0].count, 1);
  CHECK_EQ(segment.first->size, 16 * KIB);
  CHECK(segment.first->state == BLOCK_READY && segment.first->next == block[3]);
  add(3, 3);
  CHECK_EQ(segment.first->size, segment.size);
  CHECK(!segment.first->next && heap_is_valid(heap));
  end_made();
}

TEST(pending_blocks_merge_with_nobody)
{
  BEGIN_MADE(4, 8, 4, 8);
  owe(block[1], s, 0);
  owe(block[2], s, 0);
  add(0, 3);
  CHECK_EQ(heap->ready[0].count, 2);
  CHECK_EQ(heap->pending[0].count, 2);
  for (int i = 0; i < 4; i++) {
    CHECK_EQ(block[i]->state, i == 1 || i == 2 ? BLOCK_PENDING : BLOCK_READY);
    CHECK(block_is_valid(block[i]));
  }
  CHECK(heap->oldest_pending == block[1] && heap->newest_pending == block[2]);
  end_made();
}

TEST(what_the_home_stream_itself_uses_is_ready)
{
  BEGIN_MADE(4, 8);
  owe(block[0], r, 0);
  add(0, 0);
  CHECK_EQ(block[0]->state, BLOCK_READY);
  CHECK(block[0]->uses); /* for other streams it is not over */
  end_made();
}

/* What is not withheld any more still owes what it owed. */
TEST(a_block_that_is_withheld_no_more_waits_for_its_use)
{
  BEGIN_MADE(4, 8);
  block[0]->withheld = true;
  owe(block[0], s, 0);
  add(0, 0);
  free_blocks_release_withheld(heap);
  CHECK_EQ(block[0]->state, BLOCK_PENDING);
  complete(s);
  CHECK(free_blocks_promote(heap));
  CHECK_EQ(block[0]->state, BLOCK_READY);
  end_made();
}

/* ---- bytes that wait ------------------------------------------------------------ */

/* Of the pending blocks for which the host may wait. */
static size_t bytes_that_wait(const heap_t *of, bool large)
{
  size_t bytes = 0;
  for (const block_t *b = of->oldest_pending; b; b = b->newer)
    bytes += b->segment->large == large && block_awaits(b, of->stream) ? b->size : 0;
  return bytes;
}

TEST(bytes_that_wait_for_other_streams_are_counted)
{
  BEGIN_MADE(4, 8, 4, 16, 4);
  owe(block[1], s, 0);
  owe(block[3], w.stream[2], 0);
  add(1, 1);
  add(3, 3);
  CHECK_EQ(bytes_that_wait(heap, false), 24 * KIB);
  CHECK_EQ(bytes_that_wait(heap, true), 0); /* of the other size class */
  free_blocks_claim(block[3]);
  CHECK_EQ(bytes_that_wait(heap, false), 8 * KIB);
  complete(s);
  CHECK(free_blocks_promote(heap));
  CHECK_EQ(bytes_that_wait(heap, false), 0);
  end_made();
}

/* The host cannot wait for a use without an event, and does not wait for all streams. */
TEST(bytes_that_wait_for_no_single_stream_are_not_counted)
{
  BEGIN_MADE(4, 8, 4);
  use_t *use = use_take(device);
  record_t *all = stream_record_unpresented(device->all_streams);
  CHECK(use && all && use_attach(block[0], device->all_streams, all, 0, &use));
  owe_until(block[2], s, NULL, 0);
  add(0, 0);
  add(2, 2);
  CHECK_EQ(heap->pending[0].count, 2);
  CHECK_EQ(bytes_that_wait(heap, false), 0);
  owe(block[1], s, 0);
  add(1, 1);
  CHECK_EQ(bytes_that_wait(heap, false), 8 * KIB);
  end_made();
}

/* ---- which one is taken --------------------------------------------------------- */

TEST(the_best_of_the_ready_blocks_is_the_smallest_that_is_large_enough)
{
  BEGIN_MADE(12, 4, 8, 4, 4, 4);
  add(0, 0); /* 12 */
  add(2, 2); /* 8 */
  add(4, 4); /* 4 */
  CHECK(free_blocks_best_ready(heap, 512, false) == block[4]);
  CHECK(free_blocks_best_ready(heap, 4 * KIB, false) == block[4]);
  CHECK(free_blocks_best_ready(heap, 4 * KIB + 512, false) == block[2]);
  CHECK(free_blocks_best_ready(heap, 12 * KIB, false) == block[0]);
  CHECK(!free_blocks_best_ready(heap, 12 * KIB + 512, false));
  CHECK(!free_blocks_best_ready(heap, 4 * KIB, true)); /* of the other size class */
  free_blocks_claim(block[4]);
  CHECK_EQ(block[4]->state, BLOCK_CLAIMED);
  CHECK(free_blocks_best_ready(heap, 512, false) == block[2]);
  end_made();
}

TEST(a_block_is_whole_if_it_is_all_of_its_segment)
{
  BEGIN_MADE(4, 8);
  add(0, 0);
  CHECK(!free_blocks_best_whole(heap, 4 * KIB, false));
  add(1, 1);
  CHECK(free_blocks_best_whole(heap, 4 * KIB, false) == segment.first);
  CHECK(!free_blocks_best_whole(heap, 16 * KIB, false));
  end_made();
}

TEST(an_oversize_block_serves_no_small_request)
{
  BEGIN_MADE_LARGE(64 * KIB, 30 * KIB);
  CHECK_OK(esper_configure(w.core, &(esper_config){.max_split_size = 40 * MIB}));
  add(0, 0);
  CHECK(!free_blocks_best_ready(heap, 2 * MIB, true));
  CHECK(free_blocks_best_ready(heap, 60 * MIB, true) == block[0]);
  add(1, 1);
  CHECK(!free_blocks_best_whole(heap, 2 * MIB, true));
  end_made();
}

/* ---- the heap's cache ---------------------------------------------------------- */

TEST(many_blocks_of_a_size_are_kept_and_then_none)
{
  begin();
  enum { MANY = 200 };
  void *p[MANY];
  for (int i = 0; i < MANY; i++)
    p[i] = world_malloc(&w, 512, r);
  for (int i = 0; i < MANY; i++) {
    world_free(&w, p[i]);
    CHECK(kept(r) >= 1 && kept(r) <= CACHE_DEPTH);
    CHECK(esper_core_is_valid(w.core));
  }
  end();
}

TEST(a_marked_block_a_lent_one_and_a_captured_one_are_not_kept)
{
  begin();
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
  end();
}

TEST(who_listens_misses_no_action)
{
  begin();
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
  end();
}
