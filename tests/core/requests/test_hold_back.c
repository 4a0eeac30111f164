/* Before memory grows, the host waits for pending memory. */
#include "core/requests/hold_back.h"

#include "core/base/monotonic.h"
#include "esper_sleep.h"
#include "malloc_world.h"

/* The clock stands still, so that nothing depends on how busy the machine is. */
__attribute__((constructor)) static void stop_the_clock(void)
{
  monotonic_skip(0);
}

/* A device of 1 GiB and an allowance of 40 MiB: more than three blocks of 12 MiB. */
static void begin_holding(void)
{
  begin_with(1024 * MIB, 40 * MIB);
}

static uint64_t held_back(void)
{
  return world_counters(&w, 0).held_back;
}

/* As pending(), with a use until the free. */
static void *pending_by_record_stream(size_t size)
{
  void *p = block(size, r);
  world_record_stream(&w, p, s);
  world_read_on(&w, s, p, r);
  world_free(&w, p);
  return p;
}

TEST(beyond_the_allowance_the_host_waits_for_the_oldest)
{
  for (int until_free = 0; until_free < 2; until_free++) {
    begin_holding();
    void *first = NULL;
    for (int i = 0; i < 20; i++) {
      void *p = until_free ? pending_by_record_stream(12 * MIB) : pending(12 * MIB);
      first = first ? first : p;
      CHECK(i != 3 || p == first);
      sim_kernel(w.s, 0, s.handle, NULL, 0, SIM_READ); /* the streams have more to do */
    }
    CHECK_EQ(held_back(), 17);
    CHECK_EQ(reserved(), 36 * MIB);
    CHECK_EQ(calls(SIM_CALL_stream_wait), 0);
    end();
  }
}

/* Then all that is pending is waited for, whatever the allowance. */
SCENE_WITH(what_is_pending_is_waited_for_when_memory_cannot_grow, begin_with(1024 * MIB, 512 * MIB))
{
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 25. / 1024));
  void *p = pending(12 * MIB), *q = pending(12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK(world_malloc(&w, 12 * MIB, r) == q);
  CHECK_EQ(held_back(), 0);
  CHECK_EQ(world_stats(&w, 0).num_alloc_retries, 0);
}

/* A layer frees one tensor of 64 MiB, and then four of 2 MiB. */
SCENE_WITH(a_large_block_behind_smaller_ones_is_not_waited_for, begin_holding())
{
  for (int i = 0; i < 6; i++) {
    void *tensor[5];
    for (int j = 0; j < 5; j++)
      tensor[j] = block(j ? 2 * MIB : 64 * MIB, r);
    CHECK(!i || world_counters(&w, 0).bytes_pending >= 72 * MIB);
    for (int j = 0; j < 5; j++) {
      world_read_marked(&w, s, tensor[j], r);
      world_free(&w, tensor[j]);
    }
  }
  CHECK(held_back() > 0);
}

SCENE_WITH(the_two_newest_blocks_are_never_waited_for, begin_with(1024 * MIB, 1))
{
  for (int i = 0; i < 3; i++)
    pending(12 * MIB);
  CHECK_EQ(held_back(), 0);
  world_malloc(&w, 12 * MIB, r);
  CHECK_EQ(held_back(), 1);
}

/* Both streams read each block, and one of them is stuck. */
static void free_with_two_uses(int count, esper_stream first, esper_stream second)
{
  for (int i = 0; i < count; i++) {
    void *p = block(12 * MIB, r);
    world_read_marked(&w, first, p, r);
    world_read_marked(&w, second, p, r);
    world_free(&w, p);
  }
}

SCENE_WITH(what_a_stuck_stream_keeps_is_not_waited_for, begin_holding())
{
  esper_stream stuck = w.stream[3];
  free_with_two_uses(8, s, s);
  CHECK(held_back() > 0); /* not in vain */
  sim_wait_flag(w.s, 0, stuck.handle, 0);
  free_with_two_uses(8, stuck, stuck);
  CHECK_EQ(world_counters(&w, 0).held_back_in_vain, 1);
  uint64_t before = held_back();
  free_with_two_uses(8, s, stuck);
  free_with_two_uses(8, stuck, s);
  CHECK_EQ(held_back(), before);
  sim_raise_flag_now(w.s, 0);
}

/* Kept for all streams, or by one that records no event. */
SCENE_WITH(what_a_wait_cannot_free_is_not_waited_for, begin_holding())
{
  esper_stream mortal = world_mortal(&w, 0);
  for (int i = 0; i < 20; i++) {
    void *p = block(12 * MIB, r);
    if (i < 10)
      CHECK_OK(esper_free_after_all(w.core, p));
    else
      world_record_stream(&w, p, mortal);
    read_and_free(p, s);
  }
  CHECK_EQ(held_back(), 0);
}

/* ---- the allowance is raised ------------------------------------------------- */

SIM_HOOK(complete_all)
{
  sim_run_all(w.s);
}

/* Three blocks are pending. While the host waits for the oldest, all that the streams have is
 * done. */
static void drain_by_waiting(void)
{
  for (int i = 0; i < 3; i++)
    pending(12 * MIB);
  sim_after_call(w.s, SIM_CALL_event_wait, complete_all, NULL);
  world_malloc(&w, 12 * MIB, r);
  CHECK_EQ(held_back(), 1);
}

SCENE_WITH(the_allowance_is_not_raised_beyond_what_is_left, begin_with(100 * MIB, 40 * MIB))
{
  drain_by_waiting();
  CHECK_EQ(world_counters(&w, 0).allowance, 40 * MIB);
}

/* Their own, or what other memory waits for. */
TEST(a_wait_that_leaves_the_streams_work_does_not_raise_the_allowance)
{
  for (int other = 0; other < 2; other++) {
    begin_holding();
    pending(12 * MIB);
    if (other)
      sim_wait_flag(w.s, 0, t.handle, 0);
    for (int i = 0; i < 2; i++)
      read_and_free(block(12 * MIB, r), other ? t : s);
    if (!other)
      sim_wait_flag(w.s, 0, r.handle, 0);
    sim_after_call(w.s, SIM_CALL_event_wait, complete_all, NULL);
    world_malloc(&w, 12 * MIB, r);
    CHECK_EQ(held_back(), 1);
    CHECK_EQ(world_counters(&w, 0).allowance, 40 * MIB);
    sim_after_call(w.s, SIM_CALL_event_wait, NULL, NULL);
    sim_raise_flag_now(w.s, 0);
    end();
  }
}

/* ---- when nobody waits ---------------------------------------------------------- */

/* Another thread keeps freeing into the heap while this one waits. */
SIM_HOOK(free_more)
{
  int *left = context;
  if (*left > 0) {
    --*left;
    pending(2 * MIB);
  }
}

SCENE_WITH(others_that_free_for_ever_keep_nobody_waiting, begin_with(4096 * MIB, 1))
{
  for (int i = 0; i < 4; i++)
    pending(12 * MIB);
  uint64_t before = held_back();
  int left = 1000;
  sim_after_call(w.s, SIM_CALL_event_wait, free_more, &left);
  world_malloc(&w, 200 * MIB, r);
  sim_after_call(w.s, SIM_CALL_event_wait, NULL, NULL);
  CHECK(held_back() - before < 100);
  CHECK(left > 800);
}

/* Its end cannot be asked for, but that of the request's stream can. */
SCENE_WITH(waits_for_a_mortal_stream_raise_the_allowance_too, begin_holding())
{
  esper_stream mortal = world_mortal(&w, 0);
  for (int i = 0; i < 3; i++) {
    void *p = block(12 * MIB, r);
    read_and_free(p, mortal);
  }
  sim_after_call(w.s, SIM_CALL_event_wait, complete_all, NULL);
  world_malloc(&w, 12 * MIB, r);
  CHECK_EQ(world_counters(&w, 0).allowance, 80 * MIB);
  sim_after_call(w.s, SIM_CALL_event_wait, NULL, NULL);
}

SCENE_WITH(a_wait_that_left_the_streams_idle_doubles_the_allowance, begin_holding())
{
  drain_by_waiting();
  CHECK_EQ(world_counters(&w, 0).allowance, 80 * MIB);
  /* A new one is not raised yet. */
  CHECK_OK(esper_configure(w.core, &(esper_config){.allowance = 64 * MIB}));
  CHECK_EQ(world_counters(&w, 0).allowance, 64 * MIB);
  sim_after_call(w.s, SIM_CALL_event_wait, NULL, NULL);
}

SCENE_WITH(nobody_waits_inside_a_capture, begin_holding())
{
  sim_wait_flag(w.s, 0, s.handle, 0);
  for (int i = 0; i < 3; i++)
    pending(12 * MIB);
  sim_capture_begin(w.s, 0, r.handle);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  CHECK_EQ(calls(SIM_CALL_event_wait) + calls(SIM_CALL_event_synchronize), 0);
  sim_graph_destroy(w.s, graph);
  sim_raise_flag_now(w.s, 0);
}

static int allocate(void *context, int short_of_memory)
{
  (void)context, (void)short_of_memory;
  void *p = world_malloc(&w, 12 * MIB, t);
  world_free(&w, p);
  for (int i = 0; i < 8; i++) {
    p = block(2 * MIB, t);
    world_read_marked(&w, s, p, t);
    world_free(&w, p);
  }
  CHECK_EQ(world_counters(&w, 0).held_back, 0);
  return 0;
}

/* The thread that asked for the memory may hold what the other stream's work needs. */
SCENE_WITH(nobody_waits_in_a_callback, begin_as(64 * MIB, 1, SIM_WHEN_TOLD))
{
  esper_config config = {.allowance = 1, .free_memory = allocate};
  CHECK_OK(esper_configure(w.core, &config));
  CHECK_STATUS(try_malloc(100 * MIB, r), ESPER_OUT_OF_MEMORY);
}

static esper_status obtain(void *context, int device, size_t size, void **ptr)
{
  (void)context, (void)device;
  return esper_malloc(w.core, size, r, ptr);
}

static void give_back(void *context, int device, void *ptr, size_t size)
{
  (void)device, (void)size;
  for (int i = 0; i < 4; i++)
    pending(12 * MIB);
  CHECK_EQ(held_back(), 0);
  CHECK_OK(esper_free(w.core, ptr));
  ++*(int *)context;
}

SCENE_WITH(nobody_waits_in_a_mempools_own_allocator,
           begin_on((sim_options){.completion = SIM_WHEN_TOLD, .capacity = 1024 * MIB},
                    &(esper_config){.allowance = 40 * MIB}))
{
  int given_back = 0;
  esper_source source = {.obtain = obtain, .give_back = give_back, .context = &given_back};
  esper_pool *pool = world_pool(&w, 0, 0, 9);
  CHECK_OK(esper_pool_set_source(w.core, 0, 0, 9, &source));
  for (int i = 0; i < 3; i++)
    pending(12 * MIB);
  CHECK_EQ(held_back(), 0);
  void *p;
  CHECK_OK(esper_malloc_from(w.core, pool, 12 * MIB, t, &p));
  CHECK_EQ(held_back(), 0);
  CHECK_OK(esper_free(w.core, p));
  CHECK_OK(esper_pool_release(w.core, 0, 0, 9));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* its memory is a block of the default pool */
  CHECK_EQ(given_back, 1);
}

/* ---- while the host waits --------------------------------------------------------- */

static int hooks, inside;

static void give_up_locks(void (*wait)(void *), void *argument)
{
  hooks++;
  inside = 1;
  wait(argument);
  inside = 0;
}

SIM_HOOK(check_inside)
{
  CHECK(inside);
}

SCENE_WITH(the_embedder_gives_up_its_locks_meanwhile, begin_holding())
{
  esper_config config = {.allowance = 40 * MIB, .while_waiting = give_up_locks};
  CHECK_OK(esper_configure(w.core, &config));
  hooks = 0;
  sim_before_call(w.s, SIM_CALL_event_wait, check_inside, NULL);
  for (int i = 0; i < 5; i++)
    pending(12 * MIB);
  CHECK_EQ(hooks, 2);
  CHECK_EQ(held_back(), 2);
  sim_before_call(w.s, SIM_CALL_event_wait, NULL, NULL);
}

static void sleep_there(void *context)
{
  (void)context;
  CHECK_OK(esper_sleep(w.core, 0, NULL, 0, ESPER_KEEP_HOST, NULL));
}

SIM_HOOK(sleep_meanwhile)
{
  sim_before_call(w.s, SIM_CALL_event_wait, NULL, NULL);
  check_on_another_thread(sleep_there, NULL);
}

SCENE_WITH(what_goes_to_sleep_meanwhile_is_not_handed_out,
           begin_on((sim_options){WHEN_TOLD, .capacity = 1024 * MIB, .virtual_memory = true},
                    &(esper_config){.allowance = 40 * MIB}))
{
  for (int i = 0; i < 3; i++)
    pending(12 * MIB);
  sim_before_call(w.s, SIM_CALL_event_wait, sleep_meanwhile, NULL);
  CHECK_STATUS(try_malloc(12 * MIB, r), ESPER_ASLEEP);
  CHECK_EQ(held_back(), 1);
  CHECK_OK(esper_wake(w.core, 0, NULL, 0, NULL));
  world_free(&w, block(12 * MIB, r));
}
