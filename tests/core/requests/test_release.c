/* What goes back to the driver, and what stays. */
#include "one_world.h"

BEGIN(WHEN_TOLD, .capacity = 256 * MIB)

/* Whether a stream is being captured cannot be asked then, either. */
SCENE(empty_cache_says_that_the_driver_fails)
{
  world_free(&w, world_malloc(&w, 20 * MIB, r));
  sim_fail_calls_from(w.s, SIM_CALL_any, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_empty_cache(w.core, 0, NULL), ESPER_DEVICE_ERROR);
  sim_fail_call(w.s, SIM_CALL_any, 0, ESPER_OK);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
}

/* The driver may hand an address to a thread that works on another device, before its function for
 * giving it back returns. */
static void reuse_elsewhere(void *context)
{
  sim_after_call(w.s, SIM_CALL_memory_free, NULL, NULL);
  CHECK(world_malloc(&w, 12 * MIB, world_stream(&w, 1)) == context);
}

SIM_HOOK(reuse_on_another_thread)
{
  check_on_another_thread(reuse_elsewhere, context);
}

SCENE_WITH(an_address_may_come_back_while_its_segment_is_on_its_way_out,
           begin_on((sim_options){WHEN_TOLD, .devices = 2}, NULL))
{
  void *p = world_malloc(&w, 12 * MIB, w.stream[0]);
  world_free(&w, p);
  sim_after_call(w.s, SIM_CALL_memory_free, reuse_on_another_thread, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
}

SCENE(a_pinned_segment_serves_on_and_is_not_given_back)
{
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 9 * MIB, r), *segment;
  CHECK_STATUS(esper_pin(w.core, &w, NULL), ESPER_INVALID);
  CHECK_STATUS(esper_unpin(w.core, p), ESPER_INVALID);
  CHECK_OK(esper_pin(w.core, (char *)p + 5, &segment));
  CHECK(segment == p);
  CHECK_STATUS(esper_unpin(w.core, segment), ESPER_NOT_READY); /* p is live */
  world_free(&w, p);
  world_free(&w, q);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  world_free(&w, p);
  /* Not even when memory runs out. */
  CHECK_STATUS(try_malloc(250 * MIB, r), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(reserved(), 12 * MIB);
  CHECK_OK(esper_unpin(w.core, segment));
  CHECK_STATUS(esper_unpin(w.core, segment), ESPER_INVALID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  CHECK_STATUS(esper_pin(w.core, p, NULL), ESPER_INVALID);
}
