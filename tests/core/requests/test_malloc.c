/* malloc and free, in the order of the steps of requests/malloc.c. */
#include "malloc_world.h"

SCENE(a_pending_block_is_ready_as_soon_as_its_use_has_completed)
{
  void *p = pending(12 * MIB);
  sim_run_all(w.s);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(calls(SIM_CALL_event_wait), 0);
}

SCENE_WITH(who_cannot_grow_goes_on_borrowing,
           begin_on((sim_options){.completion = SIM_AT_ONCE, .capacity = 2 * MIB}, NULL))
{
  world_malloc(&w, 4 * KIB, r);
  uint64_t asked = calls(SIM_CALL_memory_alloc);
  for (int i = 0; i < 100; i++)
    world_free(&w, world_malloc(&w, 4 * KIB, s));
  CHECK_EQ(world_counters(&w, 0).loans, 100);
  CHECK_EQ(calls(SIM_CALL_memory_alloc) - asked, 3); /* not each time */
  CHECK_EQ(world_stats(&w, 0).num_ooms, 0);
  CHECK_EQ(world_stats(&w, 0).num_alloc_retries, 0);
}

SCENE_WITH(cached_segments_go_back_when_memory_is_short, begin_with(40 * MIB, ESPER_ALLOWANCE_OFF))
{
  world_free(&w, block(12 * MIB, r));
  world_free(&w, block(14 * MIB, r));
  world_malloc(&w, 30 * MIB, r);
  esper_stats stats = world_stats(&w, 0);
  CHECK_EQ(stats.num_alloc_retries, 1);
  CHECK_EQ(stats.num_ooms, 0);
  CHECK(stats.num_device_free > 0);
}

static int freed, only_if_short;
static void *victim;

static int free_victim(void *context, int short_of_memory)
{
  if (!victim || short_of_memory < only_if_short)
    return 0;
  CHECK(context == &w);
  world_free(&w, victim); /* no lock of the core's is held */
  victim = NULL;
  return ++freed;
}

SCENE_WITH(the_embedders_callback_is_asked_before_memory_grows,
           begin_with(64 * MIB, ESPER_ALLOWANCE_OFF))
{
  esper_config config = {.free_memory = free_victim, .free_memory_context = &w};
  CHECK_OK(esper_configure(w.core, &config));
  only_if_short = 0;
  void *p = victim = block(12 * MIB, r);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
}

SCENE_WITH(the_embedders_callback_is_asked_before_giving_up,
           begin_with(12 * MIB, ESPER_ALLOWANCE_OFF))
{
  esper_config config = {.free_memory = free_victim, .free_memory_context = &w};
  CHECK_OK(esper_configure(w.core, &config));
  freed = 0;
  only_if_short = 1;
  victim = block(12 * MIB, r);
  CHECK(world_malloc(&w, 12 * MIB, r));
  CHECK_EQ(freed, 1);
  CHECK_STATUS(try_malloc(12 * MIB, r), ESPER_OUT_OF_MEMORY);
}

/* s waits for what r enqueues after its next malloc. */
SCENE_WITH(work_that_waits_for_this_host_ends_in_an_error_of_the_host_wait,
           begin_with(12 * MIB, ESPER_ALLOWANCE_OFF))
{
  world_note_failures(&w);
  void *p = block(12 * MIB, r);
  world_wait(&w, s, r);
  sim_wait_flag(w.s, 0, s.handle, 0);
  sim_kernel(w.s, 0, s.handle, p, 512, SIM_READ);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  CHECK_STATUS(try_malloc(12 * MIB, r), ESPER_OUT_OF_MEMORY);
  CHECK(w.failures > 0); /* "the host waits for operation": a hang, as under native */
  sim_raise_flag(w.s, 0, r.handle, 0);
  sim_run_all(w.s);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
}

SCENE(with_nothing_pending_a_pair_calls_the_driver_for_the_capture_alone)
{
  world_free(&w, world_malloc(&w, 4096, r));
  uint64_t before = calls(SIM_CALL_any), captures = calls(SIM_CALL_stream_capture);
  for (int i = 0; i < 100; i++) {
    void *p;
    CHECK_OK(esper_malloc(w.core, 4096, r, &p));
    CHECK_OK(esper_free(w.core, p));
  }
  CHECK(calls(SIM_CALL_any) - before <= 100);
  CHECK_EQ(calls(SIM_CALL_any) - before, calls(SIM_CALL_stream_capture) - captures);
}

/* A million steps in which the host waits for what was just marked: after the first ones no event
 * is made and no memory is got, of any kind. */
SCENE_WITH(a_million_steady_steps_need_nothing_new,
           begin_on((sim_options){.completion = SIM_WHEN_TOLD}, &(esper_config){.allowance = 1}))
{
  esper_counters first = {0}, now;
  void *next;
  for (int step = 0; step < 1000000; step++) {
    CHECK_OK(esper_malloc(w.core, 3 * MIB, r, &next));
    const void *p = next;
    CHECK_OK(esper_record_use(w.core, &p, 1, s, 0, NULL));
    CHECK_OK(esper_free(w.core, next));
    if (step == 999)
      CHECK_OK(esper_get_counters(w.core, 0, &first));
  }
  CHECK_OK(esper_get_counters(w.core, 0, &now));
  CHECK(now.held_back > 100000);
  CHECK_EQ(now.events_created, first.events_created);
  CHECK_EQ(now.metadata_bytes, first.metadata_bytes);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  CHECK(now.events_alive <= 128);
}
