/* MemPools: their own allocators, their flags, and shortage of memory. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core/pools/pool.h"
#include "world.h"

static world w;
static esper_stream r, s;
static esper_pool *pool;

enum { ID = 5 };

/* An allocator that asks the simulated driver, so the oracle judges it too. */
typedef struct own {
  int live, dropped;
  esper_status answer; /* when not ESPER_OK */
  size_t shift;        /* of the addresses it gives */
} own;
static own o;

static esper_status own_obtain(void *context, int device, size_t size, void **address)
{
  own *of = context;
  const esper_driver *driver = sim_driver(w.s);
  uintptr_t at;
  if (of->answer != ESPER_OK)
    return of->answer;
  /* No lock is held. */
  CHECK_EQ(esper_pool_use_count(w.core, device, 99, 99), 0);
  if (driver->memory_alloc(driver->self, device, size, &at) != ESPER_OK)
    return ESPER_OUT_OF_MEMORY;
  of->live++;
  *address = (void *)(at + of->shift);
  return ESPER_OK;
}

static void own_give_back(void *context, int device, void *address, size_t size)
{
  own *of = context;
  const esper_driver *driver = sim_driver(w.s);
  CHECK(size > 0);
  CHECK_EQ(esper_pool_use_count(w.core, device, 99, 99), 0);
  CHECK_OK(driver->memory_free(driver->self, device, (uintptr_t)address - of->shift));
  of->live--;
}

static void own_drop(void *context)
{
  CHECK_EQ(((own *)context)->live, 0);
  CHECK_EQ(esper_pool_use_count(w.core, 0, 99, 99), 0);
  ((own *)context)->dropped++;
}

static const esper_source SOURCE = {own_obtain, own_give_back, own_drop, &o};

static void begin(size_t mib)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                         .completion = SIM_WHEN_TOLD,
                         .capacity = mib * MIB};
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  s = w.stream[1];
  o = (own){0};
  CHECK_OK(esper_pool_create(w.core, 0, 0, ID, &pool));
}

static void end(void)
{
  world_end(&w);
}

static void *get(size_t size, esper_stream stream)
{
  void *p;
  CHECK_OK(esper_malloc_from(w.core, pool, size, stream, &p));
  sim_owner_begin(w.s, p, world_size(&w, p), stream.device, stream.handle);
  return p;
}

static void use_own(void)
{
  CHECK_OK(esper_pool_set_source(w.core, 0, 0, ID, &SOURCE));
}

static void set(unsigned flags)
{
  CHECK_OK(esper_pool_set_flags(w.core, 0, 0, ID, flags, flags));
}

static void release(void)
{
  CHECK_OK(esper_pool_release(w.core, 0, 0, ID));
}

static int64_t reserved(void)
{
  return world_stats(&w, 0).reserved_bytes[ESPER_ALL].current;
}

/* ---- an allocator of its own ----------------------------------------------- */

TEST(segments_come_from_the_pools_allocator_and_go_back_to_it)
{
  begin(256);
  use_own();
  void *a = get(6 * MIB, r), *b = get(6 * MIB, r), *c = get(12 * MIB, s);
  CHECK(b == (char *)a + 6 * MIB);
  CHECK_EQ(o.live, 2);
  CHECK_EQ(reserved(), 32 * MIB);
  world_malloc(&w, 12 * MIB, r);
  CHECK_EQ(o.live, 2); /* the default pool's are the driver's */
  world_free(&w, a);
  world_free(&w, b);
  CHECK_OK(esper_pool_empty(w.core, 0, 0, ID));
  CHECK_EQ(o.live, 2); /* the pool is there: it keeps what it has */
  release();
  CHECK_OK(esper_pool_empty(w.core, 0, 0, ID));
  CHECK_EQ(o.live, 1);
  CHECK_EQ(o.dropped, 0); /* its memory is out */
  world_free(&w, c);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(o.live, 0);
  CHECK_EQ(o.dropped, 1);
  end();
  CHECK_EQ(o.dropped, 1);
}

TEST(a_core_that_goes_gives_back_and_drops)
{
  begin(256);
  use_own();
  get(12 * MIB, r);
  end();
  CHECK_EQ(o.live, 0);
  CHECK_EQ(o.dropped, 1);
}

TEST(a_pool_without_memory_drops_its_allocator_at_once)
{
  begin(256);
  use_own();
  release();
  CHECK_EQ(o.dropped, 1);
  end();
}

TEST(what_the_allocator_answers_the_malloc_answers)
{
  begin(256);
  use_own();
  void *p;
  o.answer = ESPER_OUT_OF_MEMORY;
  CHECK_STATUS(esper_malloc_from(w.core, pool, MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(world_stats(&w, 0).num_ooms, 1);
  o.answer = ESPER_DEVICE_ERROR;
  CHECK_STATUS(esper_malloc_from(w.core, pool, MIB, r, &p), ESPER_DEVICE_ERROR);
  CHECK(strstr(esper_last_error(), "(0, 5)"));
  o.answer = ESPER_OK;
  o.shift = 16;
  CHECK_STATUS(esper_malloc_from(w.core, pool, MIB, r, &p), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "multiple of 512"));
  CHECK_EQ(o.live, 0);
  o.shift = 0;
  CHECK_EQ(reserved(), 0);
  /* The driver had memory all the time. */
  CHECK_EQ(w.core->devices[0].refused, 0);
  get(MIB, r);
  end();
}

TEST(an_allocator_is_chosen_once_and_early)
{
  begin(256);
  esper_source half = {.obtain = own_obtain};
  CHECK_STATUS(esper_pool_set_source(w.core, 0, 0, ID, &half), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_source(w.core, 0, 0, 9, &SOURCE), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_source(w.core, 0, 0, 0, &SOURCE), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_source(w.core, 7, 0, ID, &SOURCE), ESPER_INVALID);
  use_own();
  CHECK_STATUS(esper_pool_set_source(w.core, 0, 0, ID, &SOURCE), ESPER_INVALID);
  esper_pool *other;
  CHECK_OK(esper_pool_create(w.core, 0, 0, 6, &other));
  void *p;
  CHECK_OK(esper_malloc_from(w.core, other, 512, r, &p));
  CHECK_STATUS(esper_pool_set_source(w.core, 0, 0, 6, &SOURCE), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "when it is made"));
  CHECK_OK(esper_free(w.core, p));
  CHECK_EQ(o.dropped, 0);
  end();
}

/* Its memory goes back when nobody reads it any more, on any stream. */
TEST(what_is_read_is_not_given_back_to_the_allocator)
{
  begin(256);
  use_own();
  void *a = get(12 * MIB, r);
  world_kernel(&w, r, a);
  world_read_on(&w, s, a, r);
  world_use(&w, a, s, ESPER_USE_NO_GATE);
  world_free(&w, a);
  release();
  sim_capture_begin(w.s, 0, r.handle); /* nobody can wait for the device */
  CHECK_OK(esper_pool_empty(w.core, 0, 0, ID));
  CHECK_EQ(o.live, 1);
  sim_capture_abort(w.s, 0, r.handle);
  CHECK_OK(esper_pool_empty(w.core, 0, 0, ID));
  CHECK_EQ(o.live, 0);
  end();
}

/* ---- flags ------------------------------------------------------------------ */

TEST(a_pool_that_does_not_split_gives_whole_segments)
{
  begin(256);
  set(ESPER_POOL_NO_SPLIT);
  void *a = get(512, r), *b = get(512, r), *c = get(3 * MIB, r);
  CHECK_EQ(world_size(&w, a), 2 * MIB);
  CHECK_EQ(world_size(&w, c), 20 * MIB);
  CHECK_EQ(reserved(), 24 * MIB);
  CHECK_EQ(world_stats(&w, 0).inactive_split[ESPER_ALL].current, 0);
  world_free(&w, b);
  CHECK(get(MIB, r) == b);
  CHECK_EQ(world_size(&w, world_malloc(&w, 512, r)), 512);
  end();
}

TEST(flags_can_be_taken_back_and_are_checked)
{
  begin(256);
  set(ESPER_POOL_NO_SPLIT);
  CHECK_OK(esper_pool_set_flags(w.core, 0, 0, ID, ESPER_POOL_NO_SPLIT, 0));
  CHECK_EQ(world_size(&w, get(512, r)), 512);
  CHECK_STATUS(esper_pool_set_flags(w.core, 0, 0, ID, 8, 8), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_flags(w.core, 3, 0, ID, 1, 1), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_flags(w.core, 0, 0, 9, 1, 1), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "(0, 9)"));
  CHECK_OK(esper_pool_set_flags(w.core, 0, 0, 9, 1, 0)); /* as pools that go do */
  CHECK_STATUS(esper_pool_set_flags(w.core, 0, 0, 0, 1, 1), ESPER_INVALID);
  end();
}

TEST(a_pool_serves_others_when_memory_is_short)
{
  begin(24);
  set(ESPER_POOL_USE_ON_OOM);
  void *a = get(12 * MIB, r);
  void *full = world_malloc(&w, 12 * MIB, r), *p;
  CHECK_STATUS(esper_malloc(w.core, 12 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  world_free(&w, a);
  void *b = world_malloc(&w, 12 * MIB, r);
  CHECK(b == a);
  world_free(&w, b);
  CHECK(get(12 * MIB, r) == b); /* it stayed the pool's */
  world_free(&w, b);
  CHECK_OK(esper_pool_set_flags(w.core, 0, 0, ID, ESPER_POOL_USE_ON_OOM, 0));
  CHECK_STATUS(esper_malloc(w.core, 12 * MIB, s, &p), ESPER_OUT_OF_MEMORY);
  release();
  CHECK(world_malloc(&w, 12 * MIB, s)); /* its segment goes back for it */
  CHECK_EQ(world_stats(&w, 0).num_device_free, 1);
  world_free(&w, full);
  end();
}

/* What it has to spare still owes a read, on which the taker is gated. */
TEST(what_a_pool_has_to_spare_may_be_pending)
{
  begin(12);
  set(ESPER_POOL_USE_ON_OOM);
  void *a = get(12 * MIB, r);
  world_kernel(&w, r, a);
  world_read_on(&w, s, a, r);
  world_use(&w, a, s, 0);
  world_free(&w, a);
  CHECK(world_malloc(&w, 12 * MIB, r) == a);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  end();
}

TEST(a_pool_serves_no_other_pool)
{
  begin(24);
  set(ESPER_POOL_USE_ON_OOM);
  world_free(&w, get(12 * MIB, r));
  esper_pool *other;
  void *p, *q;
  CHECK_OK(esper_pool_create(w.core, 0, 0, 6, &other));
  CHECK_OK(esper_malloc_from(w.core, other, 12 * MIB, r, &p));
  CHECK_STATUS(esper_malloc_from(w.core, other, 12 * MIB, r, &q), ESPER_OUT_OF_MEMORY);
  release();
  /* The segment goes back to the driver for it, as everybody's would. */
  CHECK_OK(esper_malloc_from(w.core, other, 12 * MIB, r, &q));
  CHECK_EQ(world_stats(&w, 0).num_device_free, 1);
  CHECK_OK(esper_free(w.core, p));
  CHECK_OK(esper_free(w.core, q));
  end();
}

static int on_r(void *context, void *stream)
{
  (void)context;
  return stream == r.handle;
}

/* A graph's replays touch memory that is free to the allocator. */
TEST(a_pool_with_graphs_has_nothing_to_spare)
{
  begin(24);
  set(ESPER_POOL_USE_ON_OOM);
  CHECK_OK(esper_pool_begin(w.core, 0, 0, ID, on_r, NULL));
  sim_capture_begin(w.s, 0, r.handle);
  void *a = world_malloc(&w, 12 * MIB, r), *p;
  world_kernel(&w, r, a);
  world_free(&w, a);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK_OK(esper_pool_end(w.core, 0, 0, ID, NULL));
  /* The pool's memory serves everybody again once the pool is quiesced. */
  CHECK_OK(esper_pool_begin(w.core, 0, 0, ID, on_r, NULL));
  CHECK_OK(esper_pool_end(w.core, 0, 0, ID, NULL));
  sim_graph_launch(w.s, graph, 0, r.handle);
  world_malloc(&w, 12 * MIB, s);
  CHECK_STATUS(esper_malloc(w.core, 12 * MIB, s, &p), ESPER_OUT_OF_MEMORY);
  sim_graph_destroy(w.s, graph);
  end();
}

/* ---- memory that runs short -------------------------------------------------- */

/* Inside a capture nobody waits and nothing goes back; the next request that fits
 * is served, and the graph is whole. */
TEST(a_capture_survives_being_out_of_memory)
{
  begin(44);
  CHECK_OK(esper_pool_begin(w.core, 0, 0, ID, on_r, NULL));
  sim_capture_begin(w.s, 0, r.handle);
  void *a = world_malloc(&w, 12 * MIB, r), *p;
  world_kernel(&w, r, a);
  CHECK_STATUS(esper_malloc(w.core, 40 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK(sim_capture_is_valid(w.s, 0, r.handle));
  world_free(&w, a);
  CHECK_EQ(world_malloc(&w, 12 * MIB, r) == a, 1);
  world_kernel(&w, r, a);
  void *b = world_malloc(&w, 32 * MIB, r);
  world_kernel(&w, r, b);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  CHECK_OK(esper_pool_end(w.core, 0, 0, ID, NULL));
  CHECK_STATUS(esper_malloc(w.core, 12 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  sim_graph_launch(w.s, graph, 0, s.handle);
  sim_graph_destroy(w.s, graph);
  world_free(&w, a);
  world_free(&w, b);
  release();
  release();
  world_malloc(&w, 40 * MIB, s); /* all of it came back */
  end();
}

TEST(a_mem_pool_survives_being_out_of_memory)
{
  begin(44);
  use_own();
  void *a = get(12 * MIB, r), *p;
  CHECK_STATUS(esper_malloc_from(w.core, pool, 40 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  world_kernel(&w, r, a);
  world_free(&w, a);
  /* What it has cached stays where it is, even for itself: somebody may know it. */
  CHECK_STATUS(esper_malloc_from(w.core, pool, 40 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK(get(12 * MIB, r) == a);
  CHECK(get(32 * MIB, r));
  CHECK_EQ(o.live, 2);
  end();
}

/* Memory in hand, all of it pending: waited for, not given up on. */
TEST(nothing_is_out_of_memory_with_memory_in_hand)
{
  for (int private_pool = 0; private_pool < 2; private_pool++) {
    begin(20);
    void *p[3];
    for (int i = 0; i < 3; i++) {
      p[i] = private_pool ? get(6 * MIB, r) : world_malloc(&w, 6 * MIB, r);
      world_kernel(&w, r, p[i]);
      world_read_on(&w, s, p[i], r);
      if (i == 1)
        world_record_stream(&w, p[i], s);
      else
        world_use(&w, p[i], s, i ? ESPER_USE_NO_GATE : 0);
    }
    for (int i = 0; i < 3; i++)
      world_free(&w, p[i]);
    world_run(&w, r);
    world_run(&w, s);
    void *q = private_pool ? get(18 * MIB, r) : world_malloc(&w, 18 * MIB, r);
    CHECK(q == p[0]);
    CHECK_EQ(world_stats(&w, 0).num_ooms, 0);
    end();
  }
}

/* Pools come and go in several threads, with memory of their own allocators. */
static atomic_int failures;

static void *churn(void *context)
{
  uint64_t id = 100 + (uint64_t)(uintptr_t)context;
  for (int i = 0; i < 200; i++) {
    esper_pool *mine;
    void *p, *q;
    if (esper_pool_create(w.core, 0, 0, id, &mine) != ESPER_OK)
      failures++;
    unsigned flags = i % 2 ? ESPER_POOL_USE_ON_OOM : ESPER_POOL_NO_SPLIT;
    esper_pool_set_flags(w.core, 0, 0, id, flags, flags);
    if (esper_malloc_from(w.core, mine, 3 * MIB, w.stream[id % 4], &p) ||
        esper_malloc(w.core, 5 * MIB, w.stream[id % 4], &q))
      failures++;
    else if (esper_free(w.core, p) || esper_free(w.core, q))
      failures++;
    esper_pool_release(w.core, 0, 0, id);
    if (i % 16 == 0)
      esper_pool_empty(w.core, 0, 0, id);
  }
  return NULL;
}

TEST(pools_come_and_go_in_threads)
{
  begin(160);
  pthread_t thread[4];
  atomic_store(&failures, 0);
  for (uintptr_t i = 0; i < 4; i++)
    CHECK_EQ(pthread_create(&thread[i], NULL, churn, (void *)i), 0);
  for (int i = 0; i < 4; i++)
    pthread_join(thread[i], NULL);
  CHECK_EQ(atomic_load(&failures), 0);
  world_check(&w);
  end();
}
