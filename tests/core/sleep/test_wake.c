/* Waking: the same addresses and contents, for every stream; and if the driver refuses anything,
 * everything still sleeps. */

#include "sleep_world.h"

static void begin_backed(void)
{
  begin_on((sim_options){WHEN_TOLD, .virtual_memory = 1, .capacity = 64 * MIB, .backed = 1}, NULL);
}

SCENE_WITH(contents_are_back_for_every_stream, begin_backed())
{
  enum { COUNT = 40 };
  unsigned char *p[COUNT];
  for (int i = 0; i < COUNT; i++) {
    p[i] = get_as("weights", 700 * (size_t)(i + 1) * (i % 7 ? 1 : 512), r);
    memset(p[i] + 8, 'a' + i, 500);
  }
  for (int cycle = 0; cycle < 3; cycle++) {
    sleep_all_of("weights");
    CHECK_EQ(alive().bytes, 0);
    wake("weights");
    esper_stream fresh = world_mortal(&w, 0); /* that the core has never met */
    for (int i = 0; i < COUNT; i++) {
      for (int k = 8; k < 508; k++)
        CHECK(p[i][k] == 'a' + i);
      world_kernel(&w, i % 2 ? fresh : s, p[i]);
      sim_run_all(w.s);
      memset(p[i] + 8, 'a' + i, 500);
    }
  }
}

SCENE(host_memory_serves_the_next_sleep_and_can_be_given_back)
{
  used_as("weights", 20 * MIB, r);
  sleep_all_of("weights");
  wake("weights");
  CHECK_EQ(stats_of("weights").host, 20 * MIB);
  uint64_t before = calls(SIM_CALL_host_alloc);
  sleep_all_of("weights");
  CHECK_EQ(calls(SIM_CALL_host_alloc), before);
  esper_sleep_trim(w.core); /* not what keeps contents */
  CHECK_EQ(alive().host_bytes, 20 * MIB);
  wake("weights");
  esper_sleep_trim(w.core);
  CHECK_EQ(alive().host_bytes, 0);
  sleep_all_of("weights");
  wake("weights");
}

/* Giving it back takes longer than unmapping, and the next sleep may need it. */
SCENE(a_sleep_that_keeps_nothing_leaves_host_memory_as_it_is)
{
  void *p = used_as("weights", 20 * MIB, r);
  sleep_all_of("weights");
  wake("weights");
  sim_allow_loss(w.s, 1);
  uint64_t before = calls(SIM_CALL_host_free);
  CHECK_OK(try_sleep("weights", ESPER_KEEP_NOTHING, NULL));
  CHECK_EQ(calls(SIM_CALL_host_free), before);
  CHECK_EQ(stats_of("weights").host, 20 * MIB);
  esper_sleep_trim(w.core); /* although the pages sleep */
  CHECK_EQ(alive().host_bytes, 0);
  wake("weights");
  world_kernel(&w, r, p);
}

static void fail_at(sim_call call, uint64_t nth)
{
  begin();
  void *p[3];
  for (int i = 0; i < 3; i++)
    p[i] = used_as("weights", 16 * MIB, r);
  sleep_all_of("weights");
  sim_fail_call(w.s, call, nth, ESPER_DEVICE_ERROR);
  CHECK_STATUS(try_wake("weights"), ESPER_DEVICE_ERROR);
  CHECK(esper_last_error()[0]);
  CHECK(stats_of("weights").asleep);
  CHECK_EQ(stats_of("weights").sleeping + alive().bytes, 48 * MIB);
  CHECK(!alive().bytes);
  world_check(&w);
  wake("weights");
  for (int i = 0; i < 3; i++)
    world_kernel(&w, s, p[i]);
  world_check(&w);
  sleep_all_of("weights");
  wake("weights");
  end();
}

TEST(whatever_the_driver_refuses_nothing_is_lost)
{
  for (uint64_t nth = 1; nth <= 3; nth++) {
    fail_at(SIM_CALL_page_create, nth);
    fail_at(SIM_CALL_page_map, nth);
  }
}

SCENE(waking_what_is_awake_does_nothing)
{
  used_as("weights", 4 * MIB, r);
  size_t woken = 7;
  CHECK_OK(esper_wake(w.core, -1, NULL, 0, &woken));
  CHECK_EQ(woken, 0);
  CHECK_EQ(calls(SIM_CALL_stream_create), 0);
}

static void *asleep_beside_a_capture(esper_keep keep)
{
  begin();
  void *p = used_as("t", 20 * MIB, r);
  used_as("other", 2 * MIB, s);
  sim_run_all(w.s);
  sim_allow_loss(w.s, keep == ESPER_KEEP_NOTHING);
  CHECK_OK(try_sleep("t", keep, NULL));
  sim_capture_begin(w.s, 0, s.handle);
  return p;
}

static void wakes_beside_the_capture(void *p)
{
  wake("t");
  CHECK(sim_capture_is_valid(w.s, 0, s.handle));
  world_kernel(&w, r, p);
  sim_capture_abort(w.s, 0, s.handle);
  end();
}

/* Without an event the device would be synchronised, which neither the capture nor the device
 * survives. A wake records one event before its copies, and one behind them. */
TEST(a_wake_beside_a_capture_survives_an_event_that_cannot_be_recorded)
{
  sim_call fails[] = {SIM_CALL_event_record, SIM_CALL_stream_capture};
  for (int i = 0; i < 2; i++)
    for (uint64_t nth = 1; nth <= 4; nth++) {
      void *p = asleep_beside_a_capture(ESPER_KEEP_HOST);
      sim_fail_call(w.s, fails[i], nth, ESPER_DEVICE_ERROR);
      wakes_beside_the_capture(p);
    }
}

SIM_HOOK(memory_gets_short)
{
  sim_fail_calls_from(w.s, SIM_CALL_event_create, 1, ESPER_OUT_OF_MEMORY);
}

TEST(a_first_wake_makes_its_event_before_memory_is_short)
{
  void *p = asleep_beside_a_capture(ESPER_KEEP_NOTHING);
  sim_after_call(w.s, SIM_CALL_page_create, memory_gets_short, NULL);
  wakes_beside_the_capture(p);
}

/* Notes are part of the block, which lives on as a hole and as what fills it. */
SCENE(what_was_noted_does_not_outlive_a_block_that_is_freed_asleep)
{
  used_as("t", 20 * MIB, r);
  void *p = used_as("t", 20 * MIB, r);
  used_as("t", 20 * MIB, r);
  CHECK_OK(esper_note_use(w.core, (const void *[]){p}, 1, s));
  sleep_all_of("t");
  world_free(&w, p);
  world_run(&w, s);
  wake("t");
  void *q = get_as("t", 20 * MIB, r);
  CHECK(q == p);
  world_kernel(&w, r, q);
  world_run(&w, r);
  CHECK_OK(esper_note_use(w.core, (const void *[]){q}, 1, s));
  world_read_on(&w, s, q, r);
  world_free(&w, q);
  CHECK(get_as("t", 20 * MIB, r) != q); /* which s may still read */
}

SCENE_WITH(a_wake_takes_the_place_of_memory_that_is_only_cached, begin_with(256, NULL))
{
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.25));
  used_as("t", 40 * MIB, r);
  sleep_all_of("t");
  void *other = used_as("other", 40 * MIB, r);
  world_run(&w, r);
  world_free(&w, other);
  wake("t");
}

/* Of many sizes, on pages with much free memory. */
SCENE_WITH(host_memory_is_that_of_the_live_bytes_and_no_device_is_synchronised,
           begin_with(1024, &(esper_config){.segments = ESPER_SEGMENTS_MAPPED}))
{
  enum { COUNT = 300 };
  void *p[COUNT];
  size_t live = 0;
  for (int i = 0; i < COUNT; i++)
    p[i] = used_as("t", (size_t)(i * i * 37) % (3 * MIB) + 1, i % 3 ? r : s);
  for (int i = 0; i < COUNT; i++)
    if (i % 4 == 0)
      world_free(&w, p[i]);
    else
      live += world_size(&w, p[i]);
  uint64_t synchronised = calls(SIM_CALL_device_synchronize);
  for (int cycle = 0; cycle < 3; cycle++) {
    uint64_t waits = calls(SIM_CALL_event_synchronize), copies = calls(SIM_CALL_copy_to_host);
    uint64_t pinned = calls(SIM_CALL_host_alloc);
    size_t pages = alive().bytes;
    CHECK_EQ(sleep_all_of("t").kept, live);
    CHECK_EQ(alive().host_bytes, live);
    CHECK_EQ(alive().bytes, 0);
    CHECK(cycle == 0 || calls(SIM_CALL_host_alloc) == pinned);
    /* For what came before, and for each batch of copies, of 32 MiB or more: not for each copy. */
    CHECK(calls(SIM_CALL_copy_to_host) - copies > 100);
    CHECK(calls(SIM_CALL_event_synchronize) - waits <= 1 + pages / (32 * MIB) + 1);
    waits = calls(SIM_CALL_event_synchronize);
    wake("t");
    CHECK(calls(SIM_CALL_event_synchronize) - waits <= 1);
    CHECK_EQ(alive().host_bytes, live);
  }
  CHECK_EQ(calls(SIM_CALL_device_synchronize), synchronised);
}
