/* The seven holes that earlier attempts at precise lifetimes had (docs/rules.md), with programs
 * that fall into each. A test's name begins with the number of its hole. walk_rules.c builds cores
 * that have the holes, and makes sure that these tests fail on them. */
#include <pthread.h>
#include <stdbool.h>

#include "roles.h"

static esper_stream f, g; /* readers on a second device, where there is one */

/* A device that holds `mib`, so that the next malloc must reuse. */
static void begin_on(int devices, size_t mib, int mapped)
{
  begin_roles((sim_options){.devices = devices, .capacity = mib * MIB, .virtual_memory = mapped},
              NULL);
  if (devices > 1) {
    f = world_stream(&w, 1);
    g = world_stream(&w, 1);
  }
}

static void begin(size_t mib)
{
  begin_on(1, mib, 0);
}

/* Both read by `reader`, one event for both. */
static void read_and_mark_both(void *p, void *q, esper_stream owner, esper_stream reader)
{
  const void *both[2] = {p, q};
  world_read_on(&w, reader, p, owner);
  world_read_on(&w, reader, q, owner);
  CHECK_OK(esper_record_use(w.core, both, 2, reader, 0, NULL));
}

/* What r did so far has completed, and the core knows. */
static void complete_own_order(void)
{
  void *p = world_malloc(&w, 512, o);
  read_and_mark(p, o, r);
  world_free(&w, p);
  world_run(&w, o);
  world_run(&w, r);
  world_note_all(&w);
}

static uint64_t uses(void)
{
  return world_counters(&w, 0).uses_pending;
}

/* ---- 1: a capture anywhere, or another device's stream, lost the mark ------ */

static void *capture_another_stream(void *nothing)
{
  sim_capture_begin(w.s, 0, o.handle);
  return nothing;
}

TEST(hole_1_a_capture_in_another_thread_takes_nothing_from_a_mark)
{
  begin(X + 2);
  void *x = block(X, r);
  world_malloc(&w, 512, o); /* the core knows the stream that is captured */
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, capture_another_stream, NULL) == 0);
  pthread_join(thread, NULL);
  read_and_mark(x, r, s);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  CHECK(sim_capture_is_valid(w.s, 0, o.handle));
  sim_capture_abort(w.s, 0, o.handle);
  end();
}

TEST(hole_1_a_mark_outlives_a_capture_that_begins_later)
{
  begin(X);
  void *x = block(X, r);
  read_and_mark(x, r, s);
  sim_capture_begin(w.s, 0, s.handle);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  CHECK(sim_capture_is_valid(w.s, 0, s.handle));
  sim_capture_abort(w.s, 0, s.handle);
  end();
}

TEST(hole_1_what_a_capture_reads_stays_while_it_is_recorded)
{
  begin(64);
  void *x = block(X, r);
  sim_capture_begin(w.s, 0, s.handle);
  sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) != x);
  CHECK(sim_capture_is_valid(w.s, 0, s.handle));
  sim_graph *graph = sim_capture_end(w.s, 0, s.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  end();
}

TEST(hole_1_a_stream_of_another_device_is_a_use_too)
{
  begin_on(2, X, 0);
  esper_stream far = world_stream(&w, 1);
  void *x = block(X, r);
  read_and_mark(x, r, far);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  end();
}

/* ---- 2: uses and waits grew without end ------------------------------------- */

TEST(hole_2_marks_in_a_loop_leave_one_use_a_stream)
{
  begin(X);
  void *x = block(X, r);
  for (int i = 0; i < 500; i++) {
    read_and_mark(x, r, s);
    read_and_mark(x, r, t);
  }
  CHECK_EQ(uses(), 2);
  CHECK(world_counters(&w, 0).events_alive <= 8);
  end();
}

TEST(hole_2_what_has_completed_is_dropped)
{
  begin(X);
  void *x = block(X, r);
  for (int i = 1; i < WORLD_STREAMS; i++) {
    read_and_mark(x, r, w.stream[i]);
    sim_run_all(w.s);
    esper_retire(w.core, 0);
  }
  CHECK_EQ(uses(), 1);
  end();
}

TEST(hole_2_no_wait_is_issued_at_all)
{
  begin(X + Y);
  void *x = block(X, r), *y = block(Y, r);
  read_and_mark_both(x, y, r, s);
  world_free(&w, x);
  world_free(&w, y);
  uint64_t before = sim_calls(w.s, SIM_CALL_stream_wait);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  CHECK(world_malloc(&w, Y * MIB, r) == y);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_stream_wait) - before, 0);
  end();
}

static void pipeline_step(void)
{
  void *p = block(X, r);
  read_and_mark(p, r, s);
  read_and_mark(p, r, t);
  world_free(&w, p);
  sim_run_seeded(w.s, 7, 5);
}

TEST(hole_2_a_steady_loop_grows_nothing)
{
  begin(2 * X);
  for (int i = 0; i < 100; i++)
    pipeline_step();
  sim_run_all(w.s);
  esper_counters before = world_counters(&w, 0);
  for (int i = 0; i < 2000; i++)
    pipeline_step();
  sim_run_all(w.s);
  esper_counters after = world_counters(&w, 0);
  CHECK(after.uses_pending <= 4); /* two blocks, two readers */
  CHECK_EQ(after.events_created, before.events_created);
  CHECK_EQ(after.metadata_bytes, before.metadata_bytes);
  end();
}

/* ---- 3: a block that changed its stream forgot the third one ----------------- */

TEST(hole_3_a_loan_that_comes_back_owes_the_borrower)
{
  begin(20);
  void *a = block(9, r), *b = block(9, r);
  world_free(&w, a);
  world_run(&w, r);
  CHECK(world_malloc(&w, 9 * MIB, t) == a); /* b keeps the segment r's */
  world_kernel(&w, t, a);
  world_free(&w, a);
  CHECK(world_malloc(&w, 9 * MIB, o) == a);
  world_kernel(&w, r, b);
  end();
}

/* ---- 4, 5: memory left while somebody read it -------------------------------- */

/* x is live; y is free, and s still reads it. */
static void leave_a_block_that_is_read(esper_pool *pool)
{
  void *p[2];
  for (int i = 0; i < 2; i++) {
    size_t size = (i ? Y : X) * MIB;
    if (pool)
      CHECK_OK(esper_malloc_from(w.core, pool, size, r, &p[i]));
    else
      CHECK_OK(esper_malloc(w.core, size, r, &p[i]));
    sim_owner_begin(w.s, p[i], size, 0, r.handle);
  }
  read_and_mark(p[1], r, s);
  world_free(&w, p[1]);
  complete_own_order();
}

/* Both streams are captured, so nobody can wait for what they do. */
static void empty_cache_beside_captures(esper_pool *pool)
{
  sim_capture_begin(w.s, 0, r.handle);
  sim_capture_begin(w.s, 0, s.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, pool));
  CHECK(sim_capture_is_valid(w.s, 0, r.handle));
  CHECK(sim_capture_is_valid(w.s, 0, s.handle));
  sim_capture_abort(w.s, 0, r.handle);
  sim_capture_abort(w.s, 0, s.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, pool)); /* waits */
  CHECK_EQ(sim_pending(w.s, 0, s.handle), 0);
}

/* The host cannot wait, and more is wanted than there is without y. */
static void run_short_of_memory(size_t mib)
{
  void *p;
  sim_fail_calls_from(w.s, SIM_CALL_event_wait, 1, ESPER_DEVICE_ERROR);
  sim_fail_calls_from(w.s, SIM_CALL_device_synchronize, 1, ESPER_DEVICE_ERROR);
  CHECK(esper_malloc(w.core, mib * MIB, t, &p) != ESPER_OK);
  CHECK(sim_faults(w.s) > 0);
  sim_fail_call(w.s, SIM_CALL_event_wait, 0, ESPER_OK);
  sim_fail_call(w.s, SIM_CALL_device_synchronize, 0, ESPER_OK);
  p = world_malloc(&w, mib * MIB, t); /* y was waited for, and given back */
  world_kernel(&w, t, p);
}

TEST(hole_4_a_segment_that_is_read_is_not_given_back)
{
  begin(64);
  leave_a_block_that_is_read(NULL);
  empty_cache_beside_captures(NULL);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_LARGE].current, X * MIB);
  end();
}

TEST(hole_4_pages_that_are_read_are_not_unmapped)
{
  begin_on(1, 64, 1);
  leave_a_block_that_is_read(NULL);
  empty_cache_beside_captures(NULL);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_LARGE].current, X * MIB);
  end();
}

TEST(hole_4_memory_that_is_read_is_not_given_back_when_memory_runs_out)
{
  begin(X + Y + 2 + 4);
  leave_a_block_that_is_read(NULL);
  run_short_of_memory(Y + 4);
  end();
}

TEST(hole_5_a_pools_memory_that_is_read_is_not_given_back)
{
  esper_pool *pool;
  begin(64);
  CHECK_OK(esper_pool_create(w.core, 0, 5, 1, &pool));
  leave_a_block_that_is_read(pool);
  CHECK_OK(esper_pool_release(w.core, 0, 5, 1));
  empty_cache_beside_captures(pool);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_LARGE].current, X * MIB);
  end();
}

TEST(hole_5_a_pools_memory_that_is_read_is_not_given_back_when_memory_runs_out)
{
  esper_pool *pool;
  begin(X + Y + 2 + 4);
  CHECK_OK(esper_pool_create(w.core, 0, 5, 1, &pool));
  leave_a_block_that_is_read(pool);
  CHECK_OK(esper_pool_release(w.core, 0, 5, 1));
  run_short_of_memory(Y + 4);
  end();
}

/* The pool's own allocator, which the oracle sees as well. */
static esper_status own_obtain(void *context, int device, size_t size, void **address)
{
  const esper_driver *driver = context;
  return driver->memory_alloc(driver->self, device, size, (uintptr_t *)address);
}

static void own_give_back(void *context, int device, void *address, size_t size)
{
  const esper_driver *driver = context;
  (void)size;
  CHECK_OK(driver->memory_free(driver->self, device, (uintptr_t)address));
}

static esper_pool *pool_with_an_allocator(void)
{
  esper_pool *pool;
  esper_source source = {own_obtain, own_give_back, NULL, (void *)sim_driver(w.s)};
  CHECK_OK(esper_pool_create(w.core, 0, 5, 1, &pool));
  CHECK_OK(esper_pool_set_source(w.core, 0, 5, 1, &source));
  return pool;
}

TEST(hole_5_memory_that_is_read_does_not_go_back_to_the_pools_own_allocator)
{
  begin(64);
  esper_pool *pool = pool_with_an_allocator();
  leave_a_block_that_is_read(pool);
  CHECK_OK(esper_pool_release(w.core, 0, 5, 1));
  empty_cache_beside_captures(pool);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_LARGE].current, X * MIB);
  end();
}

TEST(hole_5_memory_that_is_read_stays_out_of_the_pools_allocator_when_memory_runs_out)
{
  begin(X + Y + 2 + 4);
  leave_a_block_that_is_read(pool_with_an_allocator());
  CHECK_OK(esper_pool_release(w.core, 0, 5, 1));
  run_short_of_memory(Y + 4);
  end();
}

/* ---- 6: a pending block was taken though a ready one was there ---------------- */

TEST(hole_6_a_ready_block_is_taken_before_a_pending_one)
{
  begin(64);
  void *x = block(X, r), *y = block(Y, r);
  read_and_mark(x, r, s);
  world_free(&w, x); /* fits best, but s still reads it */
  world_free(&w, y);
  CHECK(world_malloc(&w, X * MIB, r) == y);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_stream_wait), 0);
  end();
}

TEST(hole_6_what_is_pending_can_be_seen)
{
  begin(X);
  static told_t told;
  world_listen(&w, &told);
  void *x = block(X, r);
  read_and_mark(x, r, s);
  world_free(&w, x);
  esper_counters counters = world_counters(&w, 0);
  CHECK_EQ(counters.uses_pending, 1);
  CHECK_EQ(counters.bytes_pending, X * MIB);

  esper_snapshot snapshot;
  CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
  CHECK_EQ(snapshot.block_count, 1);
  CHECK_EQ(snapshot.blocks[0].state, ESPER_BLOCK_PENDING_FREE);
  CHECK_EQ(snapshot.blocks[0].uses, 1);
  esper_snapshot_free(&snapshot);

  CHECK(told.count > 0);
  CHECK_EQ(told.entries[told.count - 1].action, ESPER_TRACE_FREE_REQUESTED);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  CHECK_EQ(world_counters(&w, 0).bytes_pending, 0);
  end();
}

/* ---- 7: a capture waited for what was outside it ------------------------------ */

TEST(hole_7_inside_a_capture_nothing_outside_is_waited_for)
{
  begin(64);
  void *x = block(X, r);
  read_and_mark(x, r, s);
  world_free(&w, x);
  sim_capture_begin(w.s, 0, r.handle);
  void *y = block(X, r);
  CHECK(y != x);
  CHECK(sim_capture_is_valid(w.s, 0, r.handle));
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  sim_run_all(w.s);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  sim_graph_launch(w.s, graph, 0, r.handle);
  sim_graph_destroy(w.s, graph);
  end();
}

TEST(hole_7_inside_a_capture_nothing_outside_is_waited_for_when_memory_runs_out)
{
  begin(X);
  void *x = block(X, r), *p;
  read_and_mark(x, r, s);
  world_free(&w, x);
  sim_capture_begin(w.s, 0, r.handle);
  CHECK(esper_malloc(w.core, X * MIB, r, &p) == ESPER_OUT_OF_MEMORY);
  CHECK(sim_capture_is_valid(w.s, 0, r.handle));
  sim_capture_abort(w.s, 0, r.handle);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  end();
}
