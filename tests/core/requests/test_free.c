/* What may be freed, and what a free does not do. */
#include "malloc_world.h"

SCENE(only_the_start_of_a_live_block_is_freed_and_only_once)
{
  char *p = block(4096, r);
  CHECK_STATUS(esper_free(w.core, p + 512), ESPER_INVALID);
  CHECK_STATUS(esper_free(w.core, &w), ESPER_INVALID);
  world_free(&w, p);
  CHECK_STATUS(esper_free(w.core, p), ESPER_INVALID);
  CHECK(esper_last_error()[0]);
  CHECK_EQ(world_stats(&w, 0).allocation[ESPER_ALL].freed, 1);
}

SCENE(free_waits_for_nothing)
{
  void *p = block(4096, r), *q = block(8192, r);
  world_read_marked(&w, s, p, r);
  world_record_stream(&w, q, s);
  uint64_t recorded = calls(SIM_CALL_event_record);
  world_free(&w, p); /* no driver call at all */
  CHECK_EQ(calls(SIM_CALL_event_record), recorded);
  world_free(&w, q); /* one event */
  CHECK_EQ(calls(SIM_CALL_event_record), recorded + 1);
  CHECK_EQ(calls(SIM_CALL_event_synchronize) + calls(SIM_CALL_device_synchronize) +
               calls(SIM_CALL_event_query),
           0);
}
