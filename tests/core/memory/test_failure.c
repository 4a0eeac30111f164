/* A driver that does not take memory back has failed: nothing is handed out any more, every request
 * says why, and the process can go on to its end. */
#include "core/memory/failure.h"

#include "sleep/sleep_world.h"

static void refuse(sim_call call, uint64_t nth)
{
  sim_fail_call(w.s, call, nth, ESPER_DEVICE_ERROR);
}

/* What holds from the refusal on, whatever it was. `live` is a block from before. */
static void check_failed_device(void *live)
{
  void *p;
  CHECK(world_has_failed(&w, 0));
  CHECK_STATUS(failure_check(&w.core->devices[0]), ESPER_DEVICE_ERROR);
  for (size_t size = 512; size <= 64 * MIB; size *= 8) {
    CHECK_STATUS(try_malloc(size, r), ESPER_DEVICE_ERROR);
    CHECK(strstr(esper_last_error(), "device 0 has failed"));
    CHECK(strstr(esper_last_error(), "failed as asked")); /* the driver's words */
    CHECK(strstr(esper_last_error(), "end the process"));
  }
  CHECK_STATUS(try_sleep(NULL, ESPER_KEEP_HOST, NULL), ESPER_DEVICE_ERROR);
  CHECK(strstr(esper_last_error(), "device 0 has failed"));
  const void *marked = live;
  CHECK_OK(esper_record_use(w.core, &marked, 1, s, 0, NULL));
  world_free(&w, live);
  world_check(&w);
  CHECK_OK(esper_malloc(w.core, 512, world_stream(&w, 1), &p)); /* the other device serves */
  CHECK_OK(esper_free(w.core, p));
  end();
}

static void begin_with_two(void)
{
  begin_on((sim_options){WHEN_TOLD, .devices = 2, .virtual_memory = 1, .capacity = 256 * MIB},
           &(esper_config){.large_segment_size = 20 * MIB, .segments = ESPER_SEGMENTS_MAPPED});
}

TEST(a_page_that_the_driver_keeps)
{
  static const sim_call CALLS[] = {SIM_CALL_page_unmap, SIM_CALL_page_release};
  for (int c = 0; c < 2; c++)
    for (uint64_t nth = 1; nth <= (CALLS[c] == SIM_CALL_page_release ? 2 : 1); nth++) {
      begin_with_two();
      void *live = get(20, r);
      world_free(&w, get(40, r)); /* two pages, which leave their addresses in one call */
      refuse(CALLS[c], nth);
      CHECK_OK(esper_empty_cache(w.core, 0, NULL));
      CHECK_EQ(sim_calls(w.s, SIM_CALL_page_unmap), 1);
      CHECK_EQ(reserved_mib(), 20); /* the books say that it went */
      check_failed_device(live);
    }
}

TEST(a_segment_that_the_driver_keeps)
{
  begin_on((sim_options){WHEN_TOLD, .devices = 2},
           &(esper_config){.segments = ESPER_SEGMENTS_CLASSIC});
  void *live = get(20, r);
  world_free(&w, get(40, r));
  refuse(SIM_CALL_memory_free, 1);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved_mib(), 20);
  check_failed_device(live);
}

/* The pages are mapped where the heap grows before the old mapping goes. */
TEST(a_page_that_does_not_leave_its_old_place)
{
  begin_with_two();
  void *live = get(20, r), *piece[8];
  for (int i = 0; i < 8; i++)
    piece[i] = get(20, r);
  for (int i = 0; i < 8; i += 2)
    world_free(&w, piece[i]);
  refuse(SIM_CALL_page_unmap, 2);
  CHECK_STATUS(try_malloc(140 * MIB, r), ESPER_DEVICE_ERROR);
  CHECK_STATUS(try_malloc(140 * MIB, r), ESPER_DEVICE_ERROR); /* nor from a cache */
  check_failed_device(live);
}

/* Memory in the block cache is not handed out, either, nor does a free open the cache again. */
TEST(cached_blocks_serve_no_more)
{
  begin_with_two();
  void *live = get(20, r), *p = world_malloc(&w, 4096, r), *q = world_malloc(&w, 4096, r);
  world_free(&w, p);
  CHECK(world_malloc(&w, 4096, r) == p);
  failure_note(&w.core->devices[0], ESPER_OK);
  CHECK(!world_has_failed(&w, 0));
  get_as("weights", 20 * MIB, r);
  sleep_all_of("weights");
  wake("weights");
  world_free(&w, p); /* to the cache */
  refuse(SIM_CALL_host_free, 1);
  esper_sleep_trim(w.core);
  CHECK_STATUS(try_malloc(4096, r), ESPER_DEVICE_ERROR);
  world_free(&w, q);
  CHECK_STATUS(try_malloc(4096, r), ESPER_DEVICE_ERROR);
  check_failed_device(live);
}

TEST(a_page_behind_a_fence_that_the_driver_keeps)
{
  begin_with_two();
  void *live = get(20, r);
  CHECK_OK(esper_fence(w.core, 1));
  refuse(SIM_CALL_page_unmap, 1);
  world_free(&w, get(2, r)); /* it goes at once */
  check_failed_device(live);
}

/* ---- sleep and wake -------------------------------------------------------- */

/* Beside the live block that it returns 80 MiB sleep. */
static void *begin_asleep(void)
{
  begin_with_two();
  void *live = get(20, r);
  for (int k = 0; k < 4; k++)
    get_as("weights", 20 * MIB, r);
  sleep_all_of("weights");
  return live;
}

TEST(memory_that_could_not_wake)
{
  static const sim_call CALLS[] = {SIM_CALL_copy_to_device, SIM_CALL_event_synchronize};
  for (int c = 0; c < 2; c++) {
    void *live = begin_asleep();
    refuse(CALLS[c], 1);
    CHECK_STATUS(try_wake("weights"), ESPER_DEVICE_ERROR);
    CHECK_STATUS(try_wake("weights"), ESPER_DEVICE_ERROR);
    check_failed_device(live);
  }
}

/* Too little memory is no failure: all of it sleeps on, unless what had come does not go back. */
TEST(a_wake_that_cannot_be_undone)
{
  void *live = begin_asleep();
  sim_fail_calls_from(w.s, SIM_CALL_page_create, 3, ESPER_OUT_OF_MEMORY);
  CHECK_STATUS(try_wake("weights"), ESPER_OUT_OF_MEMORY);
  CHECK(!world_has_failed(&w, 0));
  sim_fail_calls_from(w.s, SIM_CALL_page_create, 3, ESPER_OUT_OF_MEMORY);
  refuse(SIM_CALL_page_unmap, 1);
  try_wake("weights");
  sim_fail_call(w.s, SIM_CALL_page_create, 0, ESPER_OK);
  check_failed_device(live);
}

/* The driver refuses the wait for a copy, and then the synchronisation that is to replace it. The
 * copy may still write to the host memory, so that stays. */
TEST(host_memory_that_a_copy_may_still_write_to_stays)
{
  for (int c = 0; c < 2; c++) {
    begin_on((sim_options){WHEN_TOLD, .virtual_memory = 1, .backed = 1, .devices = 2}, NULL);
    void *live = get_as("weights", 4 * MIB, r);
    if (c)
      sim_fail_calls_from(w.s, SIM_CALL_event_record, 1, ESPER_DEVICE_ERROR);
    else /* first the devices are waited for, by an event for all streams */
      refuse(SIM_CALL_event_synchronize, 2);
    refuse(SIM_CALL_device_synchronize, 1);
    CHECK_STATUS(try_sleep(NULL, ESPER_KEEP_HOST, NULL), ESPER_DEVICE_ERROR);
    sim_fail_call(w.s, SIM_CALL_event_record, 0, ESPER_OK);
    esper_sleep_trim(w.core);
    CHECK_EQ(alive().host_bytes, 4 * MIB);
    sim_run_all(w.s); /* the copy runs: into freed memory, for AddressSanitizer to find */
    check_failed_device(live);
  }
}

/* Nor does it go when the core is destroyed. */
TEST(host_memory_that_a_copy_may_still_write_to_stays_after_the_core)
{
  begin_on((sim_options){.completion = SIM_WHEN_TOLD, .virtual_memory = 1, .backed = 1}, NULL);
  CHECK_OK(try_malloc(4 * MIB, r));
  sim_fail_calls_from(w.s, SIM_CALL_event_record, 1, ESPER_DEVICE_ERROR);
  refuse(SIM_CALL_device_synchronize, 1);
  CHECK_STATUS(try_sleep(NULL, ESPER_KEEP_HOST, NULL), ESPER_DEVICE_ERROR);
  esper_core_destroy(w.core);
  CHECK_EQ(alive().host_bytes, 4 * MIB);
  sim_run_all(w.s);
  sim_destroy(w.s);
}
