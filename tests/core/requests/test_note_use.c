/* Uses that an observer notes: which of them the free waits for, and which cost nothing. */
#include "core/requests/note_use.h"

#include "core/blocks/block.h"
#include "core/blocks/map.h"
#include "esper_sleep.h"
#include "pools/graph_pools.h"

static void note(const void *ptr, esper_stream stream)
{
  CHECK_OK(esper_note_use(w.core, &ptr, 1, stream));
}

static uint64_t uses(void)
{
  return world_counters(&w, 0).uses_pending;
}

/* Whether the next malloc on `stream` gets x. */
static bool comes_back(void *x, esper_stream stream)
{
  return world_malloc(&w, 12 * MIB, stream) == x;
}

SCENE(a_note_costs_no_event_until_the_free)
{
  void *x = world_malloc(&w, 12 * MIB, r);
  for (int i = 0; i < 3; i++) {
    note(x, s);
    note(x, t);
    note(x, r);
  }
  CHECK_EQ(sim_calls(w.s, SIM_CALL_event_record), 0);
  CHECK_EQ(uses(), 2);
  world_free(&w, x);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_event_record), 2);
}

static void note_meanwhile(void *x)
{
  note(x, r);
  note(x, s);
}

SCENE_WITH(a_note_on_memory_that_is_awake_takes_no_lock_while_other_memory_sleeps,
           begin_on((sim_options){.oracle = SIM_ORACLE_KNOWN, .virtual_memory = 1}, NULL))
{
  const char *cold = "cold";
  CHECK_OK(esper_tag_push(cold));
  void *asleep = world_malloc(&w, 12 * MIB, r);
  CHECK_OK(esper_tag_pop());
  void *x = world_malloc(&w, 12 * MIB, r);
  note(x, s);
  note(asleep, s);
  CHECK_OK(esper_sleep(w.core, 0, &cold, 1, ESPER_KEEP_HOST, NULL));
  device_t *held = &w.core->devices[0];
  lock(&held->lock);
  check_on_another_thread(note_meanwhile, x); /* it ends */
  unlock(&held->lock);
  CHECK_STATUS(esper_note_use(w.core, (const void *[]){asleep}, 1, s), ESPER_ASLEEP);
  CHECK_STATUS(esper_note_use(w.core, (const void *[]){asleep}, 1, r), ESPER_ASLEEP);
  CHECK_OK(esper_wake(w.core, 0, &cold, 1, NULL));
  CHECK_OK(esper_note_use(w.core, (const void *[]){asleep}, 1, s));
}

/* Free blocks are in a tree, whose links are where live ones remember their notes. */
SCENE(what_a_free_block_was_is_no_note)
{
  enum { BLOCKS = 15, STREAMS = 31 };
  esper_stream streams[STREAMS];
  void *x[BLOCKS];
  for (int i = 0; i < STREAMS; i++)
    streams[i] = world_stream(&w, 0);
  for (int i = 0; i < BLOCKS; i++) {
    x[i] = world_malloc(&w, (size_t)(i * 7 % BLOCKS + 2) * MIB, r);
    world_malloc(&w, 2 * MIB, r); /* between them */
    note(x[i], s);
  }
  for (int i = 0; i < BLOCKS; i++)
    world_free(&w, x[i]);
  sim_run_all(w.s);
  esper_retire(w.core, 0);
  for (int i = 0; i < BLOCKS; i++) {
    void *y = world_malloc(&w, (size_t)(i + 2) * MIB, r);
    for (int k = 0; k < STREAMS; k++)
      note(y, streams[k]);
    CHECK_EQ(uses(), STREAMS * (i + 1));
  }
}

/* A stream that may be destroyed, one of another device, and more streams than have a bit. */
SCENE(any_stream_can_be_noted)
{
  esper_stream mortal = world_mortal(&w, 0), far = world_stream(&w, 1);
  void *x = world_malloc(&w, 12 * MIB, r);
  for (int i = 0; i < 2; i++) {
    note(x, mortal);
    note(x, far);
  }
  CHECK_EQ(uses(), 2);
  for (int i = 0; i < 100; i++) {
    esper_stream more = world_stream(&w, 0);
    note(x, more);
    note(x, more);
  }
  CHECK_EQ(uses(), 102);
  world_read_on(&w, far, x, r);
  world_free(&w, x);
  CHECK(!comes_back(x, r));
}

/* It has no handle to record on at the free, so its block is held until it is seen again. */
SCENE(a_note_on_a_stream_that_may_be_destroyed_ends_what_it_holds)
{
  esper_stream mortal = world_mortal(&w, 0);
  void *x = block(12 * MIB, r), *y = world_malloc(&w, 12 * MIB, r);
  note(x, mortal);
  world_read_on(&w, mortal, x, r);
  world_free(&w, x);
  sim_run_all(w.s);
  CHECK(!comes_back(x, r));
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  note(y, mortal);
  sim_run_all(w.s);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
  CHECK(comes_back(x, r));
}

/* ---- captures --------------------------------------------------------------- */

/* Graphs of a pool are replayed in the order of their captures. */
SCENE(memory_of_an_earlier_graph_of_the_stream_needs_no_note)
{
  capture_begin(1);
  void *x = world_malloc(&w, 12 * MIB, r);
  sim_graph *first = capture_end(1);
  capture_begin(1);
  note(x, r);
  CHECK_EQ(uses(), 0);
  note(x, s); /* outside the capture, beside it */
  CHECK_EQ(uses(), 1);
  sim_graph *second = capture_end(1);
  world_free(&w, x);
  sim_graph_destroy(w.s, first);
  sim_graph_destroy(w.s, second);
  for (int i = 0; i < 2; i++)
    CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
}

/* ---- beginning to observe ------------------------------------------------------ */

/* It has no memory of its own, so nothing but its access says that it may be at work. */
SCENE(what_is_live_waits_for_a_peer_that_was_not_seen)
{
  esper_stream far = world_stream(&w, 1);
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  void *x = block(12 * MIB, r);
  world_read_on(&w, far, x, r);
  CHECK_OK(esper_note_unseen_uses(w.core));
  world_free(&w, x);
  world_run(&w, r);
  CHECK(!comes_back(x, r));
}

SCENE(a_note_without_host_memory_is_an_error)
{
  void *own = world_malloc(&w, 12 * MIB, s), *x = world_malloc(&w, 512, r);
  note(x, s); /* the stream is known from here on */
  size_t many = w.core->devices[0].uses.pieces;
  for (size_t i = 1; i < many; i++)
    note(world_malloc(&w, 512, r), s);
  void *y = world_malloc(&w, 512, r);
  const void *noted[] = {own, y, own};
  CHECK_STATUS(WITH_MALLOCS(0, esper_note_use(w.core, noted, 3, s)), ESPER_HOST_MEMORY);
  CHECK_STATUS(WITH_MALLOCS(0, esper_note_unseen_uses(w.core)), ESPER_HOST_MEMORY);
  note(y, s); /* the failed one left no trace */
  CHECK_EQ(uses(), many + 1);
}
