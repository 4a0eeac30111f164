/* Private pools as graphs use them: begun, captured into, ended and released. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "world.h"

static world w;
static esper_stream r, s;

enum { ID = 7 };

static void begin(void)
{
  world_begin(&w);
  r = w.stream[0];
  s = w.stream[1];
}

static void end(void)
{
  world_end(&w);
}

/* Filters: everything; nothing; a stream that is being captured. */
static int all(void *context, void *stream)
{
  (void)stream;
  if (context)
    ++*(int *)context;
  return 1;
}

static int none(void *context, void *stream)
{
  (void)stream;
  ++*(int *)context;
  return 0;
}

static int captured(void *context, void *stream)
{
  world *of = context;
  uint64_t capture;
  const esper_driver *driver = sim_driver(of->s);
  CHECK_OK(driver->stream_capture(driver->self, 0, stream, &capture));
  return capture != 0;
}

static int fails(void *context, void *stream)
{
  (void)context, (void)stream;
  return -1;
}

/* A cached segment of the default pool; whether it is still there. */
static bool is_cached(void)
{
  return world_stats(&w, 0).segment[ESPER_ALL].current > 0;
}

TEST(the_default_pool_stays_while_allocations_go_to_another)
{
  begin();
  int count = 0;
  world_free(&w, world_malloc(&w, 12 * MIB, r));
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, none, &count));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(is_cached());
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(!is_cached());
  end();
}

/* Who announces captures says by that when there are none. */
TEST(the_default_pool_stays_while_an_announced_capture_goes_on)
{
  begin();
  int count = 0;
  esper_config config;
  esper_get_config(w.core, &config);
  config.captures_are_announced = 1;
  CHECK_OK(esper_configure(w.core, &config));
  world_free(&w, world_malloc(&w, 12 * MIB, r));
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, none, &count));
  CHECK_OK(esper_capture_begin(w.core, 0));
  CHECK_OK(esper_capture_begin(w.core, 0));
  CHECK_OK(esper_capture_end(w.core, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(is_cached());
  CHECK_OK(esper_capture_end(w.core, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(!is_cached());
  CHECK_STATUS(esper_capture_end(w.core, 0), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "device 0"));
  CHECK_STATUS(esper_capture_begin(w.core, 9), ESPER_INVALID);
  CHECK_STATUS(esper_capture_end(w.core, 9), ESPER_INVALID);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  end();
}

/* Nor is anything of it collected, nor before memory grows. */
TEST(nothing_is_collected_while_an_announced_capture_goes_on)
{
  for (int announced = 0; announced < 2; announced++) {
    sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                           .completion = SIM_AT_ONCE,
                           .capacity = 100 * MIB};
    esper_config config = {.garbage_collection_threshold = 0.1, .captures_are_announced = 1};
    world_begin_with(&w, &options, &config);
    CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.9));
    world_free(&w, world_malloc(&w, 12 * MIB, w.stream[0]));
    if (announced)
      CHECK_OK(esper_capture_begin(w.core, 0));
    world_malloc(&w, 30 * MIB, w.stream[0]);
    CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, announced ? 2 : 1);
    end();
  }
}

static int references(uint64_t id)
{
  return esper_pool_use_count(w.core, 0, id, 0);
}

/* The pool that a live block belongs to. */
static uint64_t pool_of(const void *p)
{
  esper_snapshot snapshot;
  uint64_t id = UINT64_MAX;
  CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
  for (size_t i = 0; i < snapshot.segment_count; i++)
    if ((uintptr_t)p - snapshot.segments[i].address < snapshot.segments[i].size)
      id = snapshot.segments[i].pool[0];
  esper_snapshot_free(&snapshot);
  return id;
}

static int64_t reserved(void)
{
  return world_stats(&w, 0).reserved_bytes[ESPER_ALL].current;
}

/* A capture on r into a pool, as torch.cuda.graph makes it. */
static void capture_begin(uint64_t id)
{
  CHECK_OK(esper_pool_begin(w.core, 0, id, 0, captured, &w));
  sim_capture_begin(w.s, 0, r.handle);
  sim_capture_group(w.s, 0, r.handle, id);
}

static sim_graph *capture_end(uint64_t id)
{
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  CHECK_OK(esper_pool_end(w.core, 0, id, 0, NULL));
  return graph;
}

static void drop(sim_graph *graph, uint64_t id)
{
  sim_graph_destroy(w.s, graph);
  CHECK_OK(esper_pool_release(w.core, 0, id, 0));
}

TEST(filters_are_asked_newest_first)
{
  begin();
  int first = 0, second = 0, third = 0;
  void *context = NULL;
  CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, &first));
  CHECK_OK(esper_pool_begin(w.core, 0, 0, 2, all, &second));
  CHECK_OK(esper_pool_begin(w.core, 0, 3, 0, none, &third));
  CHECK_EQ(pool_of(world_malloc(&w, 512, r)), 0); /* (0, 2) */
  CHECK_EQ(first, 0);
  CHECK_EQ(second, 1);
  CHECK_EQ(third, 1);
  CHECK_OK(esper_pool_end(w.core, 0, 0, 2, &context));
  CHECK(context == &second);
  CHECK_EQ(pool_of(world_malloc(&w, 512, r)), 1);
  CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
  CHECK_OK(esper_pool_end(w.core, 0, 3, 0, NULL));
  world_malloc(&w, 512, r);
  CHECK_EQ(first + second + third, 4);
  end();
}

TEST(a_filter_that_fails_fails_the_malloc)
{
  begin();
  void *p;
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, fails, NULL));
  CHECK_STATUS(esper_malloc(w.core, 512, r, &p), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "(7, 0)"));
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  world_malloc(&w, 512, r);
  end();
}

TEST(misuse_is_refused_and_changes_nothing)
{
  begin();
  CHECK_STATUS(esper_pool_begin(w.core, 0, 0, 0, all, NULL), ESPER_INVALID);
  CHECK_STATUS(esper_pool_begin(w.core, 9, ID, 0, all, NULL), ESPER_INVALID);
  CHECK_STATUS(esper_pool_end(w.core, 0, ID, 0, NULL), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "not begun"));
  CHECK_STATUS(esper_pool_release(w.core, 0, ID, 0), ESPER_INVALID);
  CHECK_EQ(references(ID), 0);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  CHECK_STATUS(esper_pool_begin(w.core, 0, ID, 0, all, NULL), ESPER_INVALID);
  CHECK_EQ(references(ID), 1);
  for (uint64_t id = 100; id < 131; id++)
    CHECK_OK(esper_pool_begin(w.core, 0, id, 0, none, &w.failures));
  CHECK_STATUS(esper_pool_begin(w.core, 0, 200, 0, all, NULL), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "32 pools"));
  CHECK_EQ(references(200), 0);
  end(); /* with routes: they go with the core */
}

TEST(references_are_counted)
{
  begin();
  esper_pool *pool, *same;
  CHECK_OK(esper_pool_create(w.core, 0, ID, 0, &pool));
  CHECK_OK(esper_pool_create(w.core, 0, ID, 0, &same));
  CHECK(pool == same);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  CHECK_EQ(references(ID), 3);
  void *p = world_malloc(&w, 12 * MIB, r);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  for (int i = 2; i >= 0; i--) {
    CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
    CHECK_EQ(references(ID), i);
  }
  world_kernel(&w, r, p); /* a block outlives its pool's references */
  CHECK_OK(esper_pool_empty(w.core, 0, ID, 0));
  CHECK_EQ(reserved(), 12 * MIB);
  world_free(&w, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  CHECK_OK(esper_pool_create(w.core, 0, ID, 0, &pool));
  CHECK_EQ(references(ID), 1);
  end();
}

TEST(a_graphs_memory_stays_until_the_graph_goes)
{
  begin();
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, r) == p); /* reused inside */
  world_free(&w, p);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_OK(esper_pool_empty(w.core, 0, ID, 0));
  CHECK_EQ(reserved(), 12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  sim_graph_launch(w.s, graph, 0, s.handle);
  drop(graph, ID);
  CHECK_EQ(references(ID), 0);
  CHECK_EQ(reserved(), 24 * MIB);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* waits for the replay */
  CHECK_EQ(reserved(), 12 * MIB);
  CHECK_EQ(sim_pending_all(w.s), 0);
  end();
}

/* The replay, on a stream that the core has never met, is still running. */
TEST(memory_that_a_graph_may_touch_is_not_given_back)
{
  begin();
  esper_stream unknown = world_mortal(&w, 0);
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  world_free(&w, p);
  sim_graph *graph = capture_end(ID);
  sim_graph_launch(w.s, graph, 0, unknown.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_graph_launch(w.s, graph, 0, unknown.handle);
  drop(graph, ID);
  sim_capture_begin(w.s, 0, s.handle); /* the device cannot be waited for */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 12 * MIB);
  sim_capture_abort(w.s, 0, s.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  end();
}

TEST(an_output_that_outlives_its_graph_is_freed_behind_the_last_replay)
{
  begin();
  capture_begin(ID);
  void *out = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, out);
  sim_graph *graph = capture_end(ID);
  drop(graph, ID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  world_read_on(&w, s, out, r); /* nobody marks it */
  world_wait(&w, r, s);
  world_free(&w, out);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  end();
}

/* What a capture freed serves the next one of its pool, on any stream. */
TEST(graphs_of_one_pool_share_memory)
{
  begin();
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r), *out = world_malloc(&w, 16 * MIB, r);
  world_kernel(&w, r, p);
  world_kernel(&w, r, out);
  world_free(&w, p);
  sim_graph *first = capture_end(ID);
  sim_graph_launch(w.s, first, 0, s.handle);
  capture_begin(ID);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  world_kernel(&w, r, p);
  CHECK(world_malloc(&w, 16 * MIB, r) != out);
  sim_graph *second = capture_end(ID);
  sim_graph_launch(w.s, first, 0, s.handle);
  sim_graph_launch(w.s, second, 0, s.handle);
  CHECK_EQ(references(ID), 2);
  drop(first, ID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 12 * MIB * 1 + 2 * 16 * MIB);
  drop(second, ID);
  end();
}

TEST(a_wholly_free_segment_serves_another_stream_of_the_next_capture)
{
  begin();
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  world_free(&w, p);
  sim_graph *first = capture_end(ID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, captured, &w));
  sim_capture_begin(w.s, 0, s.handle);
  sim_capture_group(w.s, 0, s.handle, ID);
  CHECK(world_malloc(&w, 12 * MIB, s) == p);
  sim_graph *second = sim_capture_end(w.s, 0, s.handle);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  drop(first, ID);
  drop(second, ID);
  end();
}

/* Rule 8 holds for it as for a capture that goes well: a replay of the first graph may
 * still be at work. */
TEST(an_invalidated_capture_has_memory_of_its_pool)
{
  begin();
  capture_begin(ID);
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  world_free(&w, p);
  sim_graph *graph = capture_end(ID);
  sim_graph_launch(w.s, graph, 0, s.handle);
  sim_graph_destroy(w.s, graph);
  capture_begin(ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  sim_stream_wait_stream(w.s, 0, r.handle, 0, s.handle);
  CHECK(!sim_capture_is_valid(w.s, 0, r.handle));
  void *q = world_malloc(&w, 12 * MIB, r);
  CHECK(q == p);
  world_free(&w, q);
  sim_capture_abort(w.s, 0, r.handle);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  end();
}

/* Warm-up memory serves the capture: the host waits for it at the begin. */
TEST(a_capture_gets_from_its_pool_only_what_has_completed)
{
  begin();
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, p);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  capture_begin(ID);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
  end();
}

/* However many blocks owe how many uses: each of the two streams is waited for once. That
 * the reader is done its events say, if they are asked. */
static void begin_behind_many(bool done)
{
  enum { MANY = 64 };
  const void *block[MANY];
  begin();
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  for (int i = 0; i < MANY; i++) {
    block[i] = world_malloc(&w, 4 * KIB, r);
    world_read_on(&w, s, block[i], r);
    world_use(&w, block[i], s, 0);
  }
  for (int i = 0; i < MANY; i++)
    world_free(&w, (void *)block[(i * 7) % MANY]);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  if (done)
    sim_device_synchronize(w.s, 0);
  uint64_t before = sim_calls(w.s, SIM_CALL_event_synchronize);
  capture_begin(ID);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_event_synchronize), before + (done ? 1 : 2));
  CHECK(world_malloc(&w, 4 * KIB, r) != NULL);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
  end();
}

TEST(a_begin_waits_once_for_each_stream)
{
  begin_behind_many(false);
  begin_behind_many(true);
}

/* What may not be waited for is done when the host has waited for what comes after it. */
static void begin_behind_rendezvous(unsigned traits, unsigned flags)
{
  begin();
  CHECK_OK(esper_stream_set_traits(w.core, s, traits));
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *x = world_malloc(&w, 12 * MIB, r), *y = world_malloc(&w, 14 * MIB, r);
  world_kernel(&w, r, x);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, flags);
  world_wait(&w, r, s);
  world_kernel(&w, r, y);
  world_free(&w, x);
  world_free(&w, y);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  capture_begin(ID);
  CHECK(world_malloc(&w, 12 * MIB, r) == x);
  CHECK(world_malloc(&w, 14 * MIB, r) == y);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
  end();
}

TEST(what_is_over_after_the_waits_is_not_passed_over)
{
  begin_behind_rendezvous(0, ESPER_USE_NO_GATE);
  begin_behind_rendezvous(ESPER_TRAIT_RENDEZVOUS, 0);
}

/* s is being captured, so no event says when it is done with what it freed; when its use
 * of p was over an older one does. */
TEST(older_events_of_a_captured_stream_are_waited_for)
{
  begin();
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 16 * MIB, s);
  world_kernel(&w, r, p);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_kernel(&w, s, q);
  world_free(&w, p);
  world_free(&w, q);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  sim_capture_begin(w.s, 0, s.handle);
  capture_begin(ID);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK(world_malloc(&w, 16 * MIB, r) != q);
  sim_graph *graph = capture_end(ID);
  sim_capture_abort(w.s, 0, s.handle);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
  end();
}

/* s is being captured and cannot be waited for: what it freed is passed over. */
TEST(what_cannot_be_waited_for_is_passed_over)
{
  begin();
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 16 * MIB, s);
  world_kernel(&w, r, p);
  world_kernel(&w, s, q);
  world_free(&w, p);
  world_free(&w, q);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  sim_capture_begin(w.s, 0, s.handle);
  capture_begin(ID);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK(world_malloc(&w, 16 * MIB, r) != q);
  sim_graph *graph = capture_end(ID);
  CHECK(sim_capture_is_valid(w.s, 0, s.handle));
  sim_capture_abort(w.s, 0, s.handle);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
  end();
}

/* The reader of m's memory has been waited for, m itself cannot be. */
TEST(memory_stays_withheld_when_only_its_uses_have_completed)
{
  begin();
  esper_stream m = world_mortal(&w, 0);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, m);
  world_kernel(&w, m, p);
  world_read_on(&w, s, p, m);
  world_use(&w, p, s, 0);
  sim_kernel(w.s, 0, m.handle, p, 12 * MIB, SIM_READ);
  world_free(&w, p);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  capture_begin(ID);
  (void)world_stats(&w, 0); /* finds out what has completed */
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  sim_graph *graph = capture_end(ID);
  world_run(&w, m);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
  end();
}

/* Waiting for each stream is enough again, which no capture is in the way of. */
TEST(a_graph_that_went_costs_one_synchronisation)
{
  begin();
  capture_begin(ID);
  world_kernel(&w, r, world_malloc(&w, 512, r));
  drop(capture_end(ID), ID);
  uint64_t before = sim_calls(w.s, SIM_CALL_device_synchronize);
  for (int i = 0; i < 3; i++)
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(sim_calls(w.s, SIM_CALL_device_synchronize), before + 1);
  end();
}

/* What s waits for is enqueued when the pool has been begun. */
TEST(nobody_waits_for_rendezvous_work_when_a_pool_is_begun)
{
  begin();
  capture_begin(ID);
  world_wait(&w, s, r);
  void *output = world_malloc(&w, 20 * MIB, s);
  world_kernel(&w, s, output);
  world_wait(&w, r, s);
  sim_graph *first = capture_end(ID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 16 * MIB, s);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  world_kernel(&w, r, p);
  CHECK_OK(esper_stream_set_traits(w.core, s, ESPER_TRAIT_RENDEZVOUS));
  sim_wait_flag(w.s, 0, s.handle, 0);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_kernel(&w, s, q);
  world_free(&w, p);
  world_free(&w, q);
  capture_begin(ID);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  CHECK(world_malloc(&w, 16 * MIB, r) != q);
  sim_graph *second = capture_end(ID);
  sim_raise_flag(w.s, 0, r.handle, 0);
  sim_run_all(w.s);
  CHECK_EQ(sim_pending_all(w.s), 0);
  world_free(&w, output);
  drop(first, ID);
  drop(second, ID);
  end();
}

enum { FREED_AT_ONCE = 32 };

typedef struct other_thread {
  void *kept;
  void **freed;     /* FREED_AT_ONCE of them */
  atomic_int count; /* of those that it has still to free */
  atomic_bool over;
} other_thread;

static void *look_and_free(void *argument)
{
  other_thread *other = argument;
  esper_block_info info;
  while (!atomic_load(&other->over)) {
    CHECK_OK(esper_find_block(w.core, other->kept, &info));
    CHECK(info.live && info.address == other->kept);
    for (int count = atomic_load(&other->count); count; count--) {
      CHECK_OK(esper_free(w.core, other->freed[count - 1]));
      atomic_store(&other->count, count - 1);
    }
  }
  return NULL;
}

static void wait_for_frees(other_thread *other)
{
  while (atomic_load(&other->count))
    sched_yield();
}

/* Heaps of one stream are united then, and the others go: ThreadSanitizer sees who still reads
 * those. What is freed then was allocated in an earlier capture, and its segment is about to change
 * its home. */
TEST(live_memory_is_looked_at_and_freed_while_its_pool_is_sealed)
{
  enum { TIMES = 20 };
  begin();
  pthread_t id;
  esper_pool *pool;
  other_thread other = {0};
  sim_graph *graphs[TIMES];
  void *outside[TIMES][FREED_AT_ONCE]; /* of other heaps than the captures' */
  CHECK_OK(esper_pool_create(w.core, 0, ID, 0, &pool));
  CHECK_OK(esper_malloc_from(w.core, pool, 512, r, &other.kept));
  CHECK(pthread_create(&id, NULL, look_and_free, &other) == 0);
  for (int i = 0; i < TIMES; i++) {
    capture_begin(ID);
    world_kernel(&w, r, world_malloc(&w, 512, r));
    graphs[i] = capture_end(ID);
    wait_for_frees(&other);
    for (int k = 0; k < FREED_AT_ONCE; k++)
      CHECK_OK(esper_malloc_from(w.core, pool, 512, r, &outside[i][k]));
    other.freed = outside[i ? i - 1 : 0];
    if (i)
      atomic_store(&other.count, FREED_AT_ONCE);
  }
  wait_for_frees(&other);
  other.freed = outside[TIMES - 1];
  atomic_store(&other.count, FREED_AT_ONCE);
  wait_for_frees(&other);
  atomic_store(&other.over, true);
  CHECK(pthread_join(id, NULL) == 0);
  CHECK_OK(esper_free(w.core, other.kept));
  world_check(&w);
  for (int i = 0; i < TIMES; i++)
    drop(graphs[i], ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  end();
}

static void begin_pool_once(void *context, sim_call call, int device, void *object)
{
  (void)call, (void)device, (void)object;
  if (!(*(int *)context)++)
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
}

/* What is there stays there from the moment on when a capture may begin. */
TEST(a_capture_begins_while_the_cache_goes)
{
  begin();
  void *p[3];
  int times = 0;
  for (int i = 0; i < 3; i++)
    p[i] = world_malloc(&w, 20 * MIB, r);
  for (int i = 0; i < 3; i++)
    world_free(&w, p[i]);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 3);
  sim_before_call(w.s, SIM_CALL_memory_free, begin_pool_once, &times);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* in another thread */
  CHECK_EQ(times, 1);                           /* that one was on its way */
  sim_before_call(w.s, SIM_CALL_memory_free, NULL, NULL);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  end();
}

/* A warm-up tensor dies during the capture: its last reader is outside. */
TEST(what_is_freed_from_outside_waits_for_the_next_seal)
{
  begin();
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, r);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  world_kernel(&w, r, p);
  capture_begin(ID);
  world_free(&w, world_malloc(&w, 512, r));
  world_free(&w, p);
  void *q = world_malloc(&w, 12 * MIB, r);
  CHECK(q != p);
  world_free(&w, q);
  sim_graph *first = capture_end(ID);
  capture_begin(ID); /* now it has been waited for */
  void *a = world_malloc(&w, 12 * MIB, r), *b = world_malloc(&w, 12 * MIB, r);
  CHECK((a == p && b == q) || (a == q && b == p));
  sim_graph *second = capture_end(ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(first, ID);
  drop(second, ID);
  end();
}

/* A pool is begun again while a capture still works in it, and the driver does not
 * say so: what that capture marked counts on. */
TEST(a_capture_that_cannot_be_asked_about_is_not_taken_for_over)
{
  begin();
  capture_begin(ID);
  void *x = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, x);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, ESPER_USE_NO_GATE);
  world_free(&w, x);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  sim_fail_call(w.s, SIM_CALL_stream_capture, 1, ESPER_DEVICE_ERROR);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, captured, &w));
  CHECK_EQ(sim_faults(w.s), 1);
  void *y = world_malloc(&w, 12 * MIB, r);
  CHECK(y != x); /* s may still read it */
  world_kernel(&w, r, y);
  world_wait(&w, r, s);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
  end();
}

/* Of two captures that one stream was in while the pool was open, nothing is left
 * but their memory; an output keeps the pool. */
/* Memory of a graph's pool with a use that has no event, freed while a capture goes on
 * in its heap, where nothing could be held. */
typedef struct {
  bool earlier_capture, use_inside, freed_inside;
} owing;

static void owe_again_and_again(owing how)
{
  sim_options options = {.oracle = SIM_ORACLE_OFF, .completion = SIM_WHEN_TOLD};
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  s = w.stream[1];
  esper_pool *pool;
  void *x, *y;
  sim_graph *earlier = NULL;
  CHECK_OK(esper_pool_create(w.core, 0, 1, 0, &pool));
  for (int i = 0; i < 4; i++) {
    CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, NULL));
    if (how.earlier_capture)
      sim_capture_begin(w.s, 0, r.handle);
    CHECK_OK(esper_malloc(w.core, 3 * MIB, r, &x));
    if (how.earlier_capture)
      earlier = sim_capture_end(w.s, 0, r.handle);
    CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
    CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
    if (!how.use_inside)
      world_record_stream(&w, x, s);
    CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, NULL));
    sim_capture_begin(w.s, 0, r.handle);
    CHECK_OK(esper_malloc(w.core, 512, r, &y));
    world_wait(&w, s, r);
    sim_kernel(w.s, 0, s.handle, NULL, 0, SIM_READ);
    if (how.use_inside)
      world_use(&w, x, s, 0);
    world_wait(&w, r, s);
    if (how.freed_inside)
      world_free(&w, x);
    world_free(&w, y);
    sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
    CHECK(graph);
    CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
    CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
    if (!how.freed_inside)
      world_free(&w, x);
    sim_graph_destroy(w.s, graph);
    if (how.earlier_capture)
      sim_graph_destroy(w.s, earlier);
  }
  for (int i = 0; i < 2; i++) { /* a use held from the first quiesce on ends with the next */
    CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, NULL));
    CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
    CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
    CHECK_OK(sim_device_synchronize(w.s, 0));
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  }
  CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, NULL));
  CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
  CHECK_EQ(world_counters(&w, 0).bytes_pending, 0);
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  world_end(&w);
}

TEST(memory_that_owes_what_has_no_event_is_not_lost_to_its_pool)
{
  owe_again_and_again((owing){.freed_inside = true});
  owe_again_and_again((owing){.earlier_capture = true, .freed_inside = true});
  owe_again_and_again((owing){.earlier_capture = true, .use_inside = true, .freed_inside = true});
  owe_again_and_again((owing){.use_inside = true});
}

TEST(captures_of_one_stream_leave_one_heap)
{
  begin();
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, captured, &w));
  sim_graph *graph[2];
  void *kept[2];
  for (int i = 0; i < 2; i++) {
    sim_capture_begin(w.s, 0, r.handle);
    kept[i] = world_malloc(&w, 12 * MIB, r);
    world_kernel(&w, r, kept[i]);
    graph[i] = sim_capture_end(w.s, 0, r.handle);
  }
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  sim_graph_destroy(w.s, graph[0]);
  drop(graph[1], ID);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* the device was synchronised */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  world_check(&w);
  for (int i = 0; i < 2; i++)
    world_free(&w, kept[i]);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  end();
}

/* What a forward graph saved is freed while the backward one is captured. */
TEST(memory_of_an_earlier_capture_serves_the_later_that_frees_it)
{
  begin();
  capture_begin(ID);
  void *saved = world_malloc(&w, 12 * MIB, r), *used = world_malloc(&w, 14 * MIB, r),
       *read = world_malloc(&w, 16 * MIB, r);
  world_kernel(&w, r, saved);
  world_kernel(&w, r, used);
  world_kernel(&w, r, read);
  sim_graph *forward = capture_end(ID);
  sim_graph_launch(w.s, forward, 0, r.handle);
  world_kernel(&w, r, saved); /* outside, by its owner: the quiesce waits for it */
  world_read_on(&w, s, read, r);
  world_use(&w, read, s, 0);
  capture_begin(ID);
  world_free(&w, world_malloc(&w, 512, r)); /* the heap is this capture's now */
  sim_kernel(w.s, 0, s.handle, read, 512, SIM_READ);
  world_use(&w, read, s, 0); /* since the quiesce: not waited for */
  world_kernel(&w, r, saved);
  world_free(&w, saved);
  world_free(&w, used);
  world_free(&w, read);
  CHECK(world_malloc(&w, 12 * MIB, r) == saved);
  CHECK(world_malloc(&w, 14 * MIB, r) == used);
  CHECK(world_malloc(&w, 16 * MIB, r) != read);
  world_kernel(&w, r, saved);
  sim_graph *backward = capture_end(ID);
  sim_graph_launch(w.s, forward, 0, s.handle);
  sim_graph_launch(w.s, backward, 0, s.handle);
  drop(forward, ID);
  drop(backward, ID);
  end();
}

/* Something was recorded on the owner's stream between the quiesce and the capture. */
TEST(memory_that_its_owner_used_since_the_seal_waits_for_the_next)
{
  begin();
  capture_begin(ID);
  void *saved = world_malloc(&w, 12 * MIB, r);
  sim_graph *first = capture_end(ID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, captured, &w));
  world_kernel(&w, r, saved);
  void *x = world_malloc(&w, 512, s);
  world_read_on(&w, r, x, s);
  world_use(&w, x, r, 0);
  sim_capture_begin(w.s, 0, r.handle);
  sim_capture_group(w.s, 0, r.handle, ID);
  world_free(&w, world_malloc(&w, 512, r));
  world_free(&w, saved);
  CHECK(world_malloc(&w, 12 * MIB, r) != saved);
  sim_graph *second = capture_end(ID);
  drop(first, ID);
  drop(second, ID);
  end();
}

/* The same calls give the same memory, whatever has completed by then. */
TEST(the_choice_depends_on_the_calls_alone)
{
  uintptr_t got[2][6];
  for (int late = 0; late < 2; late++) {
    begin();
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
    void *warm[3];
    for (int i = 0; i < 3; i++) {
      warm[i] = world_malloc(&w, (size_t)(12 + i) * MIB, i == 1 ? s : r);
      world_kernel(&w, i == 1 ? s : r, warm[i]);
    }
    for (int i = 0; i < 3; i++)
      world_free(&w, warm[i]);
    CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
    if (!late)
      sim_run_all(w.s);
    capture_begin(ID);
    for (int i = 0; i < 6; i++) {
      void *p = world_malloc(&w, (size_t)(11 + i % 3) * MIB, r);
      got[late][i] = (uintptr_t)p;
      world_kernel(&w, r, p);
      if (i % 2)
        world_free(&w, p);
      if (late)
        sim_run_all(w.s);
    }
    sim_graph *graph = capture_end(ID);
    CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
    drop(graph, ID);
    end();
  }
  CHECK(!memcmp(got[0], got[1], sizeof got[0]));
}

TEST(the_cache_of_others_stays_while_a_pool_is_allocated_to)
{
  begin();
  world_free(&w, world_malloc(&w, 12 * MIB, r));
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  world_free(&w, world_malloc(&w, 16 * MIB, r));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 28 * MIB);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 16 * MIB);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  end();
}

/* A pool of eager work alone, begun in every step, does not grow. */
TEST(a_pool_without_captures_reuses_its_memory_at_once)
{
  begin();
  void *first = NULL;
  for (int step = 0; step < 4; step++) {
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
    for (int i = 0; i < 4; i++) {
      void *p = world_malloc(&w, 12 * MIB, r);
      world_kernel(&w, r, p);
      CHECK(!first || p == first);
      first = p;
      world_free(&w, p);
    }
    CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  }
  CHECK_EQ(reserved(), 12 * MIB);
  end();
}

/* Freed between the begin and the first malloc: no capture had a chance to get it. */
TEST(what_is_freed_after_a_begin_serves_where_nothing_is_captured)
{
  begin();
  void *p = NULL;
  for (int step = 0; step < 4; step++) {
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
    if (p)
      world_free(&w, p);
    void *q = world_malloc(&w, 12 * MIB, r);
    CHECK(!p || q == p);
    p = q;
    world_kernel(&w, r, p);
    world_read_on(&w, s, p, r);
    world_use(&w, p, s, 0);
    CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  }
  CHECK_EQ(world_counters(&w, 0).gates_issued, 3);
  CHECK_EQ(reserved(), 12 * MIB);
  end();
}

/* What a tree of graphs may read does not, though none of them was handed it. */
TEST(a_trees_memory_waits_for_the_next_begin)
{
  begin();
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, r);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  esper_checkpoint *checkpoint;
  CHECK_OK(esper_checkpoint_take(w.core, 0, ID, 0, &checkpoint));
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  esper_checkpoint_free(checkpoint);
  end();
}

/* Nor does what a graph was handed: it may be replayed on another stream. */
TEST(what_a_graph_was_handed_waits_for_the_next_begin)
{
  begin();
  capture_begin(ID);
  void *x = world_malloc(&w, 12 * MIB, r);
  world_kernel(&w, r, x);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  sim_graph_launch(w.s, graph, 0, s.handle);
  world_free(&w, x);
  CHECK(world_malloc(&w, 12 * MIB, r) != x);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  drop(graph, ID);
  end();
}
