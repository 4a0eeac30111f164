/* How a malloc ends: with a ready block, a loan, or the report that memory is exhausted. */
#include "core/requests/request.h"

#include "core/base/arena.h"
#include "core/order/device.h"
#include "malloc_world.h"

/* ---- ready blocks --------------------------------------------------------------- */

/* The part goes back to its range first: the block that stands alone fits as
 * well, and the range stays whole. */
SCENE(a_cached_block_is_not_preferred_to_a_better_fit)
{
  void *range = world_malloc(&w, 32 * MIB, r);
  world_free(&w, range);
  void *part = world_malloc(&w, 26 * MIB, r);
  CHECK(part == range);
  void *alone = world_malloc(&w, 26 * MIB, r);
  world_free(&w, alone);
  world_free(&w, part);
  CHECK(world_malloc(&w, 26 * MIB, r) == alone);
  CHECK(world_malloc(&w, 32 * MIB, r) == range);
}

SCENE(a_small_cached_block_is_not_preferred_either)
{
  void *alone = world_malloc(&w, 64 * KIB, r);
  void *guard = world_malloc(&w, 512, r);
  void *part = world_malloc(&w, 64 * KIB, r); /* the rest of the segment follows */
  world_free(&w, alone);
  world_free(&w, part);
  CHECK(world_malloc(&w, 64 * KIB, r) == alone);
  CHECK(world_malloc(&w, 64 * KIB, r) == part);
  world_free(&w, part);
  CHECK(world_malloc(&w, 64 * KIB, r) == part);
  world_free(&w, guard);
}

/* ---- loans ---------------------------------------------------------------------- */

SCENE_WITH(a_wholly_free_segment_changes_its_home,
           begin_as(1024 * MIB, ESPER_ALLOWANCE_OFF, SIM_AT_ONCE))
{
  void *p = block(12 * MIB, r);
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, t) == p);
  CHECK_EQ(world_counters(&w, 0).loans, 0);
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, t) == p);
}

SIM_HOOK(host_memory_comes_back)
{
  check_limit_malloc(-1);
}

/* The borrower becomes a use at its free. The host memory for that has to be there before. */
SCENE_WITH(without_host_memory_for_the_borrowers_use_nothing_is_lent,
           begin_as(1024 * MIB, ESPER_ALLOWANCE_OFF, SIM_AT_ONCE))
{
  void *p = block(9 * MIB, r), *stays = block(9 * MIB, r);
  world_malloc(&w, 512, t); /* t is known */
  world_free(&w, p);
  world_note_all(&w);
  sim_before_call(w.s, SIM_CALL_memory_alloc, host_memory_comes_back, NULL);
  arena_t *uses = &w.core->devices[0].uses;
  void *taken = NULL, *piece;
  check_limit_malloc(0);
  while ((piece = arena_take(uses))) {
    *(void **)piece = taken;
    taken = piece;
  }
  void *other = world_malloc(&w, 9 * MIB, t);
  for (; taken; taken = piece) {
    piece = *(void **)taken;
    arena_give(uses, taken);
  }
  CHECK(other != p);
  CHECK_EQ(world_counters(&w, 0).loans, 0);
  world_check(&w);
  world_malloc(&w, 9 * MIB, s);
  CHECK_EQ(world_counters(&w, 0).loans, 1);
  world_kernel(&w, r, stays);
}

/* ---- out of memory -------------------------------------------------------------- */

SCENE_WITH(out_of_memory_says_what_there_is, begin_with(64 * MIB, ESPER_ALLOWANCE_OFF))
{
  void *p = block(20 * MIB, r);
  CHECK_STATUS(try_malloc(50 * MIB, r), ESPER_OUT_OF_MEMORY);
  esper_failure failure;
  esper_get_failure(&failure);
  CHECK_EQ(failure.device, 0);
  CHECK_EQ(failure.requested, 50 * MIB);
  CHECK_EQ(failure.device_total, 64 * MIB);
  CHECK_EQ(failure.device_free, 44 * MIB);
  CHECK_EQ(failure.allocated, 20 * MIB);
  CHECK_EQ(failure.reserved, 20 * MIB);
  CHECK_EQ(failure.limit, SIZE_MAX);
  CHECK(strstr(esper_last_error(), "out of memory"));
  CHECK_EQ(world_stats(&w, 0).num_ooms, 1);
  /* The process goes on. */
  CHECK(world_malloc(&w, 40 * MIB, r));
  world_kernel(&w, r, p);
  CHECK_STATUS(try_malloc(SIZE_MAX, r), ESPER_OUT_OF_MEMORY);
  CHECK_STATUS(try_malloc((size_t)1 << 60, r), ESPER_OUT_OF_MEMORY);
}

SCENE(a_size_that_is_too_much_to_round_is_reported_as_it_was_asked_for)
{
  esper_failure failure;
  CHECK_STATUS(try_malloc(SIZE_MAX - 5, r), ESPER_OUT_OF_MEMORY);
  esper_get_failure(&failure);
  CHECK(failure.requested == SIZE_MAX - 5 && failure.size == SIZE_MAX - 5);
  CHECK_EQ(failure.segment, 0); /* none would do */
  CHECK_STATUS(try_malloc(2048 * MIB - 5, r), ESPER_OUT_OF_MEMORY);
  esper_get_failure(&failure);
  CHECK_EQ(failure.requested, 2048 * MIB - 5);
  CHECK_EQ(failure.size, 2048 * MIB);
  CHECK_EQ(failure.segment, 2048 * MIB);
}

SCENE_WITH(out_of_memory_tells_what_private_pools_have, begin_with(64 * MIB, ESPER_ALLOWANCE_OFF))
{
  esper_failure failure;
  world_malloc_from(&w, world_pool(&w, 0, 3, 0), 12 * MIB, r);
  block(20 * MIB, r);
  CHECK_STATUS(try_malloc(40 * MIB, r), ESPER_OUT_OF_MEMORY);
  esper_get_failure(&failure);
  CHECK_EQ(failure.private_pools, 12 * MIB);
  CHECK_EQ(failure.reserved, 32 * MIB);
}

static void look_at_failure(void *failure)
{
  esper_get_failure(failure);
}

SCENE_WITH(a_failure_is_told_to_the_thread_that_had_it, begin_with(64 * MIB, ESPER_ALLOWANCE_OFF))
{
  esper_failure here, there;
  CHECK_STATUS(try_malloc(80 * MIB, r), ESPER_OUT_OF_MEMORY);
  check_on_another_thread(look_at_failure, &there);
  esper_get_failure(&here);
  CHECK_EQ(here.requested, 80 * MIB);
  CHECK_EQ(there.requested, 0);
}

/* ---- growth that is rejected ------------------------------------------------------ */

/* What pages that move cannot give. */
SCENE_WITH(growth_by_pages_can_be_rejected,
           begin_on((sim_options){WHEN_TOLD, .virtual_memory = 1, .capacity = 1000 * MIB},
                    &(esper_config){.rejection_share = 0.3}))
{
  block(100 * MIB, r);
  void *b = block(150 * MIB, r);
  world_free(&w, b);
  CHECK_REFUSED(try_malloc(202 * MIB, r), ESPER_REJECTED, "30%");
  esper_failure failure;
  esper_get_failure(&failure);
  CHECK_EQ(failure.segment, 202 * MIB);
  CHECK_EQ(failure.reserved, 250 * MIB);
  CHECK_EQ(world_stats(&w, 0).num_oom_rejections, 1);
  CHECK_EQ(world_stats(&w, 0).num_ooms, 0);
  CHECK_EQ(reserved(), 250 * MIB);
  CHECK(block(200 * MIB, r) == b); /* 50 more */
  CHECK_EQ(reserved(), 300 * MIB);
}
