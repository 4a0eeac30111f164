/* How a core begins, is configured, and ends. */
#include "core/base/types.h"
#include "one_world.h"

TEST(a_core_that_cannot_be_made_says_why)
{
  sim *device = sim_create(NULL);
  esper_core *core;
  sim_fail_call(device, SIM_CALL_device_count, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_core_create(sim_driver(device), NULL, &core), ESPER_DEVICE_ERROR);
  CHECK(!core);
  CHECK(strstr(esper_last_error(), "device_count"));
  sim_destroy(device);
}

TEST(without_host_memory_no_core_is_made)
{
  sim *device = sim_create(NULL);
  esper_core *core;
  long calls = 0;
  for (esper_status status = ESPER_HOST_MEMORY; status != ESPER_OK; calls++) {
    CHECK(calls < 100);
    status = WITH_MALLOCS(calls, esper_core_create(sim_driver(device), NULL, &core));
    CHECK(status == ESPER_OK ? core != NULL : status == ESPER_HOST_MEMORY && !core);
  }
  CHECK(calls > 3);
  CHECK(esper_core_is_valid(core));
  esper_core_destroy(core);
  sim_destroy(device);
}

TEST(the_configuration_is_replaced_as_a_whole)
{
  esper_config config, first = {.allowance = 64 * MIB, .max_split_size = 40 * MIB},
                       second = {.large_segment_size = 40 * MIB};
  begin_on((sim_options){0}, &first);
  esper_get_config(w.core, &config);
  CHECK(!memcmp(&config, &first, sizeof config));
  CHECK_OK(esper_configure(w.core, &second));
  esper_get_config(w.core, &config);
  CHECK(!memcmp(&config, &second, sizeof config));
  first.rejection_share = 7;
  CHECK_STATUS(esper_configure(w.core, &first), ESPER_INVALID);
  esper_get_config(w.core, &config);
  CHECK(!memcmp(&config, &second, sizeof config));
  end();
}

/* A block that was not oversize when it was handed out is one when it is free. */
TEST(the_block_cache_serves_no_oversize_request_after_a_configuration)
{
  for (int open = 0; open < 2; open++) {
    esper_config config = {.segments = ESPER_SEGMENTS_CLASSIC};
    begin_on((sim_options){0}, &config);
    void *p = world_malloc(&w, 4 * MIB, r), *q = world_malloc(&w, MIB, r);
    config.max_split_size = 2 * MIB;
    CHECK_OK(esper_configure(w.core, &config));
    if (open)
      world_free(&w, q); /* opens the cache, so that the next free takes no lock */
    world_free(&w, p);
    CHECK(world_malloc(&w, 4 * MIB, r) == p);
    CHECK_EQ(world_stats(&w, 0).oversize_allocations.current, 1);
    world_free(&w, p);
    CHECK_EQ(world_stats(&w, 0).oversize_allocations.current, 0);
    end();
  }
}

/* What was freed is still read, behind a flag: such work would never end, if this thread had still
 * to enqueue the rest. */
TEST(destroy_does_not_wait_for_ever_where_nothing_completes)
{
  begin_on((sim_options){WHEN_TOLD}, NULL);
  void *p = world_malloc(&w, 4 * MIB, r);
  sim_wait_flag(w.s, 0, s.handle, 0);
  read_and_free(p, s);
  world_note_failures(&w);
  esper_core_destroy(w.core);
  CHECK(sim_calls(w.s, SIM_CALL_event_wait) > 0);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_event_synchronize), 0);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_device_synchronize), 0);
  CHECK(w.failures); /* the driver got back what is still read */
  sim_destroy(w.s);
}

TEST(cores_do_not_mix)
{
  world a, b;
  world_begin(&a);
  world_begin(&b);
  void *p = world_malloc(&a, 512, a.stream[0]);
  CHECK_STATUS(esper_free(b.core, p), ESPER_INVALID);
  esper_block_info info;
  CHECK_STATUS(esper_find_block(b.core, p, &info), ESPER_INVALID);
  world_end(&a);
  world_end(&b);
}
