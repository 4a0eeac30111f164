/* One test for each lifetime rule: the smallest program that goes wrong without the rule.
 * walk_rules.c switches off every rule in turn, and some test in this file or in test_holes.c must
 * fail. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "core/base/rules.h"
#include "esper_sleep.h"
#include "roles.h"

/* A device that holds `mib`, so that the next malloc must reuse. */
static void begin_with(size_t mib, size_t allowance)
{
  esper_config config = {.allowance = allowance};
  begin_roles((sim_options){.capacity = mib * MIB}, &config);
}

static void begin(size_t mib)
{
  begin_with(mib, ESPER_ALLOWANCE_OFF);
}

/* What all streams of the first device did so far has completed, and the core knows. */
static void complete_here(void)
{
  world_run(&w, r);
  world_run(&w, o);
  world_note_all(&w);
}

/* The same, where pages can be mapped. */
static void begin_mapped(size_t mib)
{
  esper_config config = {.large_segment_size = 20 * MIB}; /* its pages */
  begin_roles((sim_options){.capacity = mib * MIB, .virtual_memory = 1}, &config);
}

/* An event of the core's on `stream`, which covers all that is there. */
static void record_something(esper_stream stream, esper_stream other)
{
  void *p = world_malloc(&w, 512, other);
  read_and_mark(p, other, stream);
  world_free(&w, p);
}

/* ---- 1, 2: numbers, and no waits ------------------------------------------ */

static atomic_int others_event_recorded;
static pthread_t slow_thread;

/* The slow thread has its number and stands right before the driver's call. */
static void hold_up(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)call, (void)device, (void)object;
  if (!pthread_equal(pthread_self(), slow_thread))
    return;
  atomic_store(&others_event_recorded, 1);
  for (int i = 0; i < 100 && atomic_load(&others_event_recorded) != 2; i++)
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
}

static void use_until(void *p, esper_stream reader)
{
  void *event = sim_event_create(w.s, 0);
  const void *ptr = p;
  CHECK_OK(sim_event_record(w.s, 0, event, reader.handle));
  CHECK_OK(esper_record_use_event(w.core, &ptr, 1, event, 0, NULL));
  sim_event_destroy(w.s, 0, event);
}

static void *mark_slowly(void *p)
{
  slow_thread = pthread_self();
  sim_before_call(w.s, SIM_CALL_stream_wait, hold_up, NULL);
  use_until(p, s);
  return NULL;
}

/* Uses that come as an event share a stream of the core's. If the slow thread had number 1 but
 * waited for its event after number 2 was recorded, the end of 2 would be taken for that of 1. */
TEST(numbers_follow_the_drivers_order)
{
  begin(64);
  void *x = block(X, r), *y = block(Y, r), *z = world_malloc(&w, 512, r);
  use_until(z, t); /* makes the shared stream */
  world_wait(&w, s, r);
  sim_wait_flag(w.s, 0, s.handle, 0);
  sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
  world_read_on(&w, t, y, r);
  pthread_t thread;
  atomic_store(&others_event_recorded, 0);
  pthread_create(&thread, NULL, mark_slowly, x);
  while (!atomic_load(&others_event_recorded))
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  use_until(y, t);
  atomic_store(&others_event_recorded, 2);
  pthread_join(thread, NULL);
  sim_before_call(w.s, SIM_CALL_stream_wait, NULL, NULL);
  world_free(&w, x);
  sim_run_all(w.s); /* all but s */
  esper_retire(w.core, 0);
  CHECK(block(X, r) != x);
  sim_raise_flag_now(w.s, 0);
  end();
}

/* By the program's lights comm may use what r gets: it comes after all that r was given. */
TEST(no_stream_is_made_to_wait_for_what_memory_owes)
{
  begin(X);
  void *x = block(X, r);
  read_and_mark(x, r, s);
  world_free(&w, x);
  esper_stream comm = t;
  world_wait(&w, comm, r);
  void *y = world_malloc(&w, X * MIB, r);
  world_kernel(&w, comm, y);
  end();
}

/* ---- 3, 4: owner order, and obligations of bytes -------------------------- */

TEST(an_event_from_before_the_free_does_not_cover_it)
{
  begin(X + 2);
  void *x = world_malloc(&w, X * MIB, o);
  record_something(o, r);
  world_run(&w, r);
  world_run(&w, o); /* the event has completed */
  world_kernel(&w, o, x);
  world_free(&w, x);
  esper_retire(w.core, 0);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  end();
}

/* The last malloc of o opens the block cache, so the free after it takes no lock. */
TEST(a_free_without_the_lock_is_not_covered_by_an_earlier_event)
{
  begin(X + 2);
  void *x = world_malloc(&w, X * MIB, o);
  world_free(&w, x);
  record_something(o, r);
  world_run(&w, r);
  world_run(&w, o); /* the event has completed */
  CHECK(world_malloc(&w, X * MIB, o) == x);
  world_kernel(&w, o, x);
  world_free(&w, x);
  esper_retire(w.core, 0);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  end();
}

TEST(what_is_still_read_is_not_handed_out_without_the_lock)
{
  begin(X);
  void *x = world_malloc(&w, X * MIB, r);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  world_kernel(&w, r, x);
  read_and_mark(x, r, s);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  end();
}

TEST(a_merged_block_has_the_later_stamp)
{
  begin(20 + 2);
  void *a = world_malloc(&w, 9 * MIB, r), *b = world_malloc(&w, 9 * MIB, r);
  world_free(&w, a);
  complete_here(); /* covers a's free */
  world_kernel(&w, r, b);
  world_free(&w, b);
  CHECK(world_malloc(&w, 18 * MIB, o) == a);
  end();
}

TEST(the_borrower_of_a_block_is_a_use_when_it_frees_it)
{
  begin(20);
  void *a = block(9, r), *b = block(9, r);
  world_free(&w, a);
  world_run(&w, r);
  CHECK(world_malloc(&w, 9 * MIB, t) == a); /* b keeps the segment r's */
  world_kernel(&w, t, a);
  world_free(&w, a);
  CHECK(world_malloc(&w, 9 * MIB, r) == a);
  world_kernel(&w, r, b);
  end();
}

TEST(another_stream_gets_only_what_has_completed)
{
  begin(X);
  void *x = block(X, r);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, s) == x);
  end();
}

/* What r did before it was captured cannot be waited for meanwhile. */
static void what_is_still_read_stays(void)
{
  void *x = block(X, r), *y = block(Y, r);
  read_and_mark(x, r, s);
  world_free(&w, x);
  world_free(&w, y); /* owner order is as good as a use */
  sim_capture_begin(w.s, 0, r.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, (X + Y) * MIB);
  CHECK(sim_capture_is_valid(w.s, 0, r.handle));
  sim_capture_abort(w.s, 0, r.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  end();
}

TEST(memory_that_is_still_read_is_not_given_back)
{
  begin(64);
  what_is_still_read_stays();
}

TEST(pages_that_are_still_read_are_not_unmapped)
{
  begin_mapped(64);
  what_is_still_read_stays();
}

/* Pages of 20 MiB, every other one free; their owner is still at work on them. */
static void *pages[4];
static void begin_scattered(const esper_stream *owner)
{
  begin_mapped(256);
  for (int i = 0; i < 4; i++)
    pages[i] = block(20, *owner);
  world_free(&w, pages[0]);
  world_free(&w, pages[2]);
}

/* ... nor where they were before they moved. */
TEST(stale_pages_are_unmapped_when_nobody_uses_them)
{
  begin_scattered(&r);
  block(40, r);
  block(10, r);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_page_unmap), 0);
  world_run(&w, r);
  block(10, r);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_page_unmap), 2);
  end();
}

TEST(pages_of_another_stream_are_lent_when_nobody_uses_them)
{
  begin_scattered(&s);
  block(40, r);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 120 * MIB);
  end();
}

/* r takes 22 MiB of two pages that it is still at work on; the rest is not s's. */
TEST(pages_that_are_lent_owe_what_they_owed)
{
  begin_scattered(&r);
  block(22, r);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 80 * MIB);
  block(16, s);
  end();
}

/* ---- 5, 6: uses and events ------------------------------------------------ */

/* `s` reads memory of `r` that is freed without a mark. `r` waits for `s` later, but before it
 * touches memory again: under PyTorch's own allocator that is in time. */
static void *read_and_free(void)
{
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_free(&w, x);
  record_something(r, o);
  world_run(&w, o);
  world_run(&w, r);
  esper_retire(w.core, 0); /* r's own work is done */
  return x;
}

TEST(who_waits_after_the_free_finds_its_memory_untouched)
{
  begin(2 * X + 2 * Y);
  void *x = read_and_free();
  world_kernel(&w, t, world_malloc(&w, X * MIB, t));
  world_wait(&w, r, s);
  CHECK(world_malloc(&w, X * MIB, r) == x); /* its own stream needs no event */
  world_kernel(&w, r, x);
  end();
}

TEST(what_was_borrowed_waits_for_every_stream)
{
  begin(2 * X + 2 * Y);
  void *x = block(X, r);
  world_free(&w, x);
  world_run(&w, r);
  void *lent = world_malloc(&w, (X - 2) * MIB, t);
  CHECK(lent == x);
  world_kernel(&w, t, lent);
  world_read_on(&w, s, lent, t);
  world_free(&w, lent);
  world_run(&w, t);
  world_kernel(&w, r, world_malloc(&w, (X - 2) * MIB, r));
  end();
}

TEST(pages_that_are_read_before_a_late_wait_stay)
{
  begin_mapped(64);
  read_and_free();
  world_kernel(&w, t, world_malloc(&w, 40 * MIB, t));
  world_wait(&w, r, s);
  world_run(&w, s);
  end();
}

TEST(a_block_has_one_use_a_stream)
{
  begin(X);
  void *x = block(X, r);
  for (int i = 0; i < 10; i++) {
    read_and_mark(x, r, s);
    world_record_stream(&w, x, t);
  }
  world_check(&w);
  CHECK_EQ(world_counters(&w, 0).uses_pending, 2);
  end();
}

TEST(the_later_use_on_a_stream_replaces_the_earlier)
{
  begin(X);
  void *x = block(X, r);
  read_and_mark(x, r, s);
  world_run(&w, r);
  world_run(&w, s); /* the first mark has completed, but nobody asked */
  read_and_mark(x, r, s);
  world_free(&w, x);
  esper_retire(w.core, 0);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  end();
}

/* Backward, for example, reads it again after the mark. */
static void check_lasts_until_free(bool marked_again)
{
  begin(64);
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, ESPER_USE_UNTIL_FREE);
  if (marked_again) /* as exact: the first mark still stands */
    read_and_mark(x, r, s);
  world_read_on(&w, s, x, r);
  world_free(&w, x);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, (X + .5) / 64));
  CHECK(block(X, r) == x);
  end();
}

TEST(a_mark_until_the_free_lasts_until_the_free)
{
  check_lasts_until_free(false);
  check_lasts_until_free(true);
}

TEST(an_event_is_not_recorded_again_while_referenced)
{
  begin(X + Y);
  void *x = block(X, r), *y = block(Y, r);
  read_and_mark(x, r, s);
  read_and_mark(y, r, t);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  end();
}

TEST(a_failed_query_satisfies_nothing)
{
  begin(X);
  void *x = block(X, r);
  read_and_mark(x, r, s);
  world_free(&w, x);
  sim_fail_calls_from(w.s, SIM_CALL_event_query, 1, ESPER_DEVICE_ERROR);
  esper_retire(w.core, 0);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  CHECK(sim_faults(w.s) > 0);
  sim_fail_call(w.s, SIM_CALL_event_query, 0, ESPER_OK);
  end();
}

/* ---- 7: captures ----------------------------------------------------------- */

TEST(on_a_capturing_stream_no_event_is_recorded)
{
  begin(64);
  void *x = block(X, r), *y = block(X, r);
  world_record_stream(&w, y, s);
  sim_capture_begin(w.s, 0, s.handle);
  sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
  world_use(&w, x, s, 0);
  world_free(&w, y); /* its use on s cannot be recorded now: it is held */
  CHECK(sim_capture_is_valid(w.s, 0, s.handle));
  void *z = world_malloc(&w, X * MIB, r);
  CHECK(z != y);
  sim_graph *graph = sim_capture_end(w.s, 0, s.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  CHECK_EQ(world_counters(&w, 0).captured_uses, 1);
  end();
}

/* As CUDA has it: an event may be recorded inside a capture, and a stream that waits for it
 * joins. */
static bool captured_meanwhile;

static esper_status capture_and_record(void *self, int device, void *event, void *stream)
{
  (void)self;
  if (!captured_meanwhile && stream == s.handle) {
    captured_meanwhile = true; /* by another thread, since the core asked */
    sim_capture_begin(w.s, device, stream);
  }
  return sim_event_record(w.s, device, event, stream);
}

static esper_status wait_and_join(void *self, int device, void *stream, void *event)
{
  (void)self;
  return sim_stream_wait(w.s, device, stream, event);
}

static void use_until_free(void *x)
{
  world_record_stream(&w, x, s);
}

static void use_until_now(void *x)
{
  world_use(&w, x, s, 0);
}

static void use_one_of_two(void *x)
{
  const void *both[] = {NULL, x};
  CHECK_OK(esper_record_use(w.core, both, 2, s, 0, NULL));
}

static void capture_while_recording(void mark(void *))
{
  sim_options options = {.completion = SIM_WHEN_TOLD, .capacity = X * MIB};
  world_begin_with(&w, &options, NULL);
  esper_core_destroy(w.core);
  esper_driver driver = *sim_driver(w.s);
  driver.event_record = capture_and_record;
  driver.stream_wait = wait_and_join;
  CHECK_OK(esper_core_create(&driver, NULL, &w.core));
  r = w.stream[0];
  s = w.stream[1];
  captured_meanwhile = false;
  void *x = block(X, r), *y;
  world_read_on(&w, s, x, r);
  mark(x);
  world_free(&w, x);
  CHECK_STATUS(esper_malloc(w.core, X * MIB, r, &y), ESPER_OUT_OF_MEMORY);
  CHECK(captured_meanwhile);
  uint64_t capture;
  CHECK_OK(driver.stream_capture(driver.self, 0, r.handle, &capture));
  CHECK_EQ(capture, 0);
  sim_graph *graph = sim_capture_end(w.s, 0, s.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  CHECK_OK(esper_malloc(w.core, X * MIB, r, &y)); /* an event of after the capture does */
  CHECK(y == x);
  CHECK_OK(esper_free(w.core, y));
  end();
}

TEST(nobody_joins_a_capture_that_begins_while_an_event_is_recorded)
{
  capture_while_recording(use_until_free);
  capture_while_recording(use_until_now);
  capture_while_recording(use_one_of_two);
}

/* The driver is asked before and after; a capture may come and go in between. */
static esper_status record_inside(void *self, int device, void *event, void *stream)
{
  (void)self;
  bool inside = !captured_meanwhile && stream == s.handle;
  if (inside) {
    captured_meanwhile = true;
    sim_capture_begin(w.s, device, stream);
  }
  esper_status status = sim_event_record(w.s, device, event, stream);
  if (inside)
    sim_graph_destroy(w.s, sim_capture_end(w.s, device, stream));
  return status;
}

TEST(an_event_of_a_capture_that_came_and_went_holds_nothing_up_for_long)
{
  sim_options options = {.completion = SIM_WHEN_TOLD, .capacity = 64 * MIB};
  world_begin_with(&w, &options, NULL);
  esper_core_destroy(w.core);
  esper_driver driver = *sim_driver(w.s);
  driver.event_record = record_inside;
  CHECK_OK(esper_core_create(&driver, NULL, &w.core));
  r = w.stream[0];
  s = w.stream[1];
  captured_meanwhile = false;
  void *small = world_malloc(&w, 512, r), *x = block(X, r);
  world_record_stream(&w, small, s);
  world_free(&w, small); /* the event at its free is inside the capture */
  CHECK(captured_meanwhile);
  for (int i = 0; i < 3; i++) {
    sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
    world_use(&w, x, s, 0);
    world_free(&w, x);
    CHECK(world_counters(&w, 0).bytes_pending >= X * MIB);
    sim_run_all(w.s);
    CHECK_EQ(world_counters(&w, 0).bytes_pending, 0);
    x = block(X, r);
  }
  world_free(&w, x);
  end();
}

/* Where no event stands for all streams, the host waits for one after the other, and then for the
 * whole device, which a capture would not survive. */
static void begin_capture_at_second(void *context, sim_call call, int device, void *object)
{
  (void)call, (void)object;
  if (++*(int *)context == 2)
    sim_capture_begin(w.s, device, s.handle);
}

TEST(a_capture_that_begins_while_the_host_waits_goes_on)
{
  begin(64);
  int waits = 0;
  esper_stream mortal = world_mortal(&w, 0); /* has nothing else to be waited for */
  world_free(&w, world_malloc(&w, 512, mortal));
  void *x = block(X, r), *y = block(X, s);
  world_free(&w, x);
  world_free(&w, y);
  sim_fail_calls_from(w.s, SIM_CALL_event_record_all, 1, ESPER_UNSUPPORTED);
  sim_before_call(w.s, SIM_CALL_event_wait, begin_capture_at_second, &waits);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* in another thread than the capture's */
  CHECK(waits >= 2 && sim_capture_is_valid(w.s, 0, s.handle));
  CHECK_EQ(sim_calls(w.s, SIM_CALL_device_synchronize), 0);
  sim_before_call(w.s, SIM_CALL_event_wait, NULL, NULL);
  sim_fail_call(w.s, SIM_CALL_event_record_all, 0, ESPER_OK);
  sim_graph *graph = sim_capture_end(w.s, 0, s.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  end();
}

TEST(queue_order_holds_within_one_capture_only)
{
  begin(64);
  void *x = block(X, r);
  world_free(&w, x);
  sim_capture_begin(w.s, 0, r.handle);
  void *y = block(X, r); /* not x, which work outside still writes */
  CHECK(y != x);
  world_free(&w, y);
  CHECK(world_malloc(&w, X * MIB, r) == y); /* inside, the queue orders */
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  void *z = world_malloc(&w, X * MIB, r); /* and outside */
  CHECK(z == x);
  sim_graph_launch(w.s, graph, 0, r.handle);
  sim_graph_destroy(w.s, graph);
  end();
}

static int any_stream(void *context, void *stream)
{
  (void)context, (void)stream;
  return 1;
}

static void pool_begin(void)
{
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, any_stream, NULL));
}

static void pool_end(void)
{
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
}

static void pool_release(void)
{
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
}

TEST(a_capture_gets_from_its_pool_only_what_has_completed)
{
  begin(64);
  pool_begin();
  void *x = block(X, r);
  world_free(&w, x);
  pool_end();
  pool_begin();
  sim_capture_begin(w.s, 0, r.handle);
  CHECK(block(X, r) == x); /* the host has waited for r */
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  pool_end();
  sim_graph_destroy(w.s, graph);
  pool_release();
  pool_release();
  end();
}

TEST(what_was_handed_out_outside_a_capture_is_not_free_in_it)
{
  begin(64);
  pool_begin();
  void *x = block(X, r), *y = block(Y, r);
  world_free(&w, y);
  pool_end();
  pool_begin();
  sim_capture_begin(w.s, 0, r.handle);
  CHECK(block(Y, r) == y); /* the heap is the capture's now */
  world_free(&w, x);
  CHECK(block(X, r) != x);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  pool_end();
  sim_graph_destroy(w.s, graph);
  pool_release();
  pool_release();
  end();
}

TEST(memory_that_a_graph_may_touch_is_not_given_back)
{
  begin(64);
  pool_begin();
  sim_capture_begin(w.s, 0, r.handle);
  world_free(&w, block(X, r));
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  pool_end();
  sim_graph_launch(w.s, graph, 0, s.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_graph_launch(w.s, graph, 0, s.handle);
  sim_graph_destroy(w.s, graph);
  pool_release();
  end();
}

/* The graph is replayed on r, in no order with t, which allocates from the pool outside
 * captures. */
TEST(memory_that_a_graph_may_touch_is_lent_to_no_other_stream)
{
  begin(64);
  pool_begin();
  sim_capture_begin(w.s, 0, r.handle);
  world_free(&w, block(X, r));
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  pool_end();
  pool_begin();
  void *y = world_malloc(&w, X * MIB, t);
  world_kernel(&w, t, y);
  sim_graph_launch(w.s, graph, 0, r.handle);
  world_kernel(&w, t, y);
  pool_end();
  sim_graph_destroy(w.s, graph);
  world_free(&w, y);
  pool_release();
  pool_release();
  end();
}

/* s reads what was one block; the checkpoint cuts it, and both parts are read. */
TEST(putting_a_checkpoint_back_clears_nothing)
{
  for (int front = 0; front < 2; front++) {
    esper_pool *pool;
    esper_checkpoint *checkpoint;
    esper_checkpoint_delta delta;
    void *p[2], *whole;
    begin(20);
    CHECK_OK(esper_pool_create(w.core, 0, 7, 0, &pool));
    for (int i = 0; i < 2; i++)
      CHECK_OK(esper_malloc_from(w.core, pool, 10 * MIB - MIB, r, &p[i]));
    CHECK_OK(esper_free(w.core, p[front]));
    CHECK_OK(esper_checkpoint_take(w.core, 0, 7, 0, &checkpoint));
    CHECK_OK(esper_free(w.core, p[!front]));
    CHECK_OK(esper_malloc_from(w.core, pool, 20 * MIB, r, &whole));
    sim_owner_begin(w.s, whole, 20 * MIB, 0, r.handle);
    world_kernel(&w, r, whole);
    read_and_mark(whole, r, s);
    world_free(&w, whole);
    CHECK_OK(esper_checkpoint_restore(w.core, checkpoint, &delta));
    CHECK_EQ(delta.live_count, 1);
    CHECK(delta.live[0] == p[!front]);
    CHECK_OK(esper_free(w.core, p[!front]));
    for (int i = 0; i < 2; i++) {
      CHECK_OK(esper_malloc_from(w.core, pool, 9 * MIB, r, &p[i]));
      sim_owner_begin(w.s, p[i], world_size(&w, p[i]), 0, r.handle);
      world_kernel(&w, r, p[i]);
    }
    free(delta.freed);
    esper_checkpoint_free(checkpoint);
    end();
  }
}

/* Two blocks, each read by another stream; the checkpoint makes them one again. */
TEST(a_merged_block_owes_what_both_owed)
{
  esper_pool *pool;
  esper_checkpoint *checkpoint;
  esper_checkpoint_delta delta;
  void *p[2], *whole;
  begin(20);
  CHECK_OK(esper_pool_create(w.core, 0, 7, 0, &pool));
  CHECK_OK(esper_malloc_from(w.core, pool, 20 * MIB, r, &whole));
  CHECK_OK(esper_checkpoint_take(w.core, 0, 7, 0, &checkpoint));
  CHECK_OK(esper_free(w.core, whole));
  for (int i = 0; i < 2; i++) {
    CHECK_OK(esper_malloc_from(w.core, pool, 10 * MIB - MIB / 2, r, &p[i]));
    sim_owner_begin(w.s, p[i], world_size(&w, p[i]), 0, r.handle);
    world_kernel(&w, r, p[i]);
    read_and_mark(p[i], r, i ? t : s);
    world_free(&w, p[i]);
  }
  CHECK_OK(esper_checkpoint_restore(w.core, checkpoint, &delta));
  CHECK_EQ(delta.live_count, 1);
  CHECK_OK(esper_free(w.core, whole));
  CHECK_OK(esper_malloc_from(w.core, pool, 20 * MIB, r, &whole));
  sim_owner_begin(w.s, whole, 20 * MIB, 0, r.handle);
  free(delta.freed);
  esper_checkpoint_free(checkpoint);
  end();
}

/* s may still read x when r's next node runs, as long as r has not waited for it. */
TEST(inside_a_capture_a_use_holds_until_its_nodes_come_before)
{
  begin(64);
  sim_capture_begin(w.s, 0, r.handle);
  void *x = block(X, r);
  read_and_mark(x, r, s);
  world_free(&w, x);
  CHECK(block(X, r) != x);
  world_wait(&w, r, s);
  CHECK(block(X, r) == x);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  end();
}

/* o reads x, and nobody says so: s waits for that after the free, and later than r for s. */
TEST(inside_a_capture_a_branch_gets_no_memory_of_another)
{
  begin(64);
  sim_capture_begin(w.s, 0, r.handle);
  world_wait(&w, s, r);
  void *x = block(X, s);
  world_read_on(&w, o, x, s);
  world_free(&w, x);
  world_wait(&w, r, s);
  CHECK(block(X, r) != x);
  world_wait(&w, s, o);
  CHECK(block(X, s) == x);
  world_wait(&w, r, s);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  end();
}

/* o, outside, reads what the capture was given, and no edge can lead there. */
TEST(nothing_inside_a_capture_satisfies_what_is_owed_outside)
{
  begin(64);
  sim_capture_begin(w.s, 0, r.handle);
  void *x = world_malloc(&w, X * MIB, r);
  sim_kernel(w.s, 0, o.handle, x, 512, SIM_READ);
  world_use(&w, x, o, 0);
  world_free(&w, x);
  CHECK(block(X, r) != x);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  end();
}

/* The body reads y and is a node that t does not come after. */
TEST(what_is_freed_while_another_graph_is_captured_has_no_point)
{
  begin(128);
  sim_capture_begin(w.s, 0, r.handle);
  void *y = block(Y, r);
  world_wait(&w, t, r);
  sim_capture_body(w.s, 0, r.handle, s.handle);
  block(X, s);
  sim_kernel(w.s, 0, s.handle, y, 512, SIM_READ);
  world_free(&w, y);
  CHECK(block(Y, r) != y); /* the body is not over */
  sim_kernel(w.s, 0, s.handle, NULL, 0, SIM_READ);
  CHECK(!sim_capture_end(w.s, 0, s.handle));
  world_wait(&w, r, t);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  sim_graph_destroy(w.s, graph);
  end();
}

/* ---- 9: when in doubt, withhold -------------------------------------------- */

/* s reads memory of r, which waits for s only after the free: t may not have it meanwhile. */
TEST(inside_a_capture_others_come_after_all_branches)
{
  begin(64);
  sim_capture_begin(w.s, 0, r.handle);
  void *x = block(X, r);
  world_free(&w, world_malloc(&w, 512, s)); /* so that the core knows s, which reads */
  world_wait(&w, s, r);
  world_kernel(&w, s, world_malloc(&w, 512, s));
  sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
  world_free(&w, x);
  world_wait(&w, t, r);
  block(X, t);
  world_wait(&w, r, s);
  world_wait(&w, r, t);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  sim_graph_launch(w.s, graph, 0, r.handle);
  sim_graph_destroy(w.s, graph);
  end();
}

TEST(a_use_that_cannot_be_recorded_holds_the_block)
{
  begin(X);
  esper_stream mortal = world_mortal(&w, 0);
  void *x = block(X, r);
  world_record_stream(&w, x, mortal);
  world_read_on(&w, mortal, x, r);
  world_destroy_stream(&w, mortal);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) == x); /* the host waits for the device */
  CHECK_EQ(sim_pending_all(w.s), 0);
  end();
}

TEST(a_destroyed_streams_handle_is_another_stream)
{
  begin(X);
  esper_stream mortal = world_mortal(&w, 0);
  void *x = block(X, r);
  world_record_stream(&w, x, mortal);
  world_read_on(&w, mortal, x, r);
  world_destroy_stream(&w, mortal);
  esper_stream other = world_mortal(&w, 0);
  CHECK(other.handle == mortal.handle);
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) == x);
  end();
}

/* The stream that has the handle now says nothing of the one that had it. */
TEST(a_stream_that_has_ended_keeps_what_it_is_owed)
{
  begin(X + 2);
  esper_stream mortal = world_mortal(&w, 0);
  void *x = block(X, r), *y = world_malloc(&w, 512, r);
  world_record_stream(&w, x, mortal);
  world_read_on(&w, mortal, x, r);
  world_destroy_stream(&w, mortal);
  world_free(&w, x); /* held */
  esper_stream other = world_mortal(&w, 0);
  CHECK(other.handle == mortal.handle);
  world_use(&w, y, other, 0);
  world_run(&w, other);
  esper_retire(w.core, 0);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  CHECK(world_malloc(&w, X * MIB, r) == x); /* the host waits */
  end();
}

/* ---- 10: waits of the host -------------------------------------------------- */

/* s waits for a flag that r raises after its next malloc, for which an allowance of nothing makes
 * the host wait. */
static void check_hold_back(bool by_record_stream)
{
  begin_with(64, 1);
  void *x = block(X, r);
  world_wait(&w, s, r);
  sim_wait_flag(w.s, 0, s.handle, 0);
  sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
  void *more[2] = {block(X, r), block(X, r)};
  for (int i = 0; i < 3; i++) {
    void *p = i ? more[i - 1] : x;
    if (by_record_stream)
      world_record_stream(&w, p, s);
    else
      world_use(&w, p, s, 0);
    world_free(&w, p);
  }
  CHECK(block(X, r) != x);
  CHECK_EQ(world_counters(&w, 0).held_back_in_vain, 1);
  CHECK(block(X, r) != x); /* nobody waits again so soon */
  CHECK_EQ(world_counters(&w, 0).held_back, 1);
  sim_raise_flag(w.s, 0, r.handle, 0);
  sim_run_all(w.s);
  CHECK_EQ(sim_pending_all(w.s), 0);
  end();
}

TEST(a_wait_for_work_that_waits_for_this_host_ends)
{
  check_hold_back(false);
  check_hold_back(true);
}

/* ---- observers -------------------------------------------------------------- */

/* r captures a graph that reads its own x. The graph is replayed on t, and x is wanted again. */
TEST(what_a_graph_reads_waits_for_the_stream_of_the_replay)
{
  begin(64);
  void *x = block(X, r);
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, any_stream, NULL));
  sim_capture_begin(w.s, 0, r.handle);
  sim_kernel(w.s, 0, r.handle, x, X * MIB, SIM_READ);
  CHECK_OK(esper_note_use(w.core, (const void *[]){x}, 1, r));
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
  world_wait(&w, t, r);
  sim_graph_launch(w.s, graph, 0, t.handle);
  sim_graph_destroy(w.s, graph);
  world_free(&w, x);
  world_kernel(&w, r, world_malloc(&w, X * MIB, r));
  sim_run_all(w.s);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
  end();
}

/* s reads x before anybody looks. */
TEST(what_is_live_when_an_observer_begins_waits_for_every_stream)
{
  begin(64);
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  CHECK_OK(esper_note_unseen_uses(w.core));
  world_free(&w, x);
  world_kernel(&w, r, world_malloc(&w, X * MIB, r));
  end();
}

/* ---- sleep -------------------------------------------------------------------- */

static void sleep_and_wake(void)
{
  CHECK_OK(esper_sleep(w.core, -1, NULL, 0, ESPER_KEEP_HOST, NULL));
  CHECK_OK(esper_wake(w.core, -1, NULL, 0, NULL));
}

/* s reads x, and nobody has marked that. */
TEST(what_an_unmarked_stream_reads_does_not_go_to_sleep_early)
{
  begin_mapped(256);
  void *x = block(X, r);
  world_wait(&w, s, r);
  world_kernel(&w, s, x);
  sleep_and_wake();
  end();
}

/* The second graph reads what the first one left in memory that is free by now. */
TEST(free_memory_of_a_graph_sleeps_with_its_contents)
{
  sim_options options = {.virtual_memory = 1, .backed = 1, .capacity = 64 * MIB};
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  sim_capture_begin(w.s, 0, r.handle);
  char *x = world_malloc(&w, X * MIB, r);
  world_free(&w, x);
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  memset(x, 'x', 4096); /* as a replay does */
  sleep_and_wake();
  for (int i = 0; i < 4096; i++)
    CHECK_EQ(x[i], 'x');
  sim_graph_destroy(w.s, graph);
  end();
}

TEST(a_page_is_not_unmapped_while_it_is_copied)
{
  begin_mapped(256);
  block(X, r);
  sleep_and_wake();
  end();
}

TEST(what_woke_may_be_used_on_a_stream_that_nobody_knows)
{
  begin_mapped(256);
  void *x = block(X, r);
  sleep_and_wake();
  esper_stream fresh = world_mortal(&w, 0);
  world_kernel(&w, fresh, x);
  end();
}

/* x is freed asleep. Its pages are not there to be lent. */
TEST(what_is_freed_asleep_is_not_lent)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN, .virtual_memory = 1, .capacity = 64 * MIB};
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  CHECK_OK(esper_tag_push("weights"));
  void *x = block(Y, r);
  CHECK_OK(esper_tag_pop());
  const char *weights = "weights";
  CHECK_OK(esper_sleep(w.core, -1, &weights, 1, ESPER_KEEP_HOST, NULL));
  world_free(&w, x);
  block(Y, r);
  CHECK_OK(esper_wake(w.core, -1, &weights, 1, NULL));
  world_check(&w);
  end();
}

/* ---- fences ------------------------------------------------------------------- */

static void begin_fenced(void)
{
  begin_mapped(256);
  CHECK_OK(esper_fence(w.core, 1));
}

/* An access after the free is noticed, whatever the stream asks for next. */
TEST(memory_with_a_fence_serves_once)
{
  begin_fenced();
  void *x = block(X, r);
  CHECK_OK(esper_fence(w.core, 0));
  world_free(&w, x);
  CHECK(world_malloc(&w, X * MIB, r) != x);
  end();
}

/* s reads x, and has marked that. */
TEST(a_fence_is_not_unmapped_early)
{
  begin_fenced();
  void *x = block(X, r);
  read_and_mark(x, r, s);
  world_free(&w, x);
  block(Y, r);
  end();
}

TEST(addresses_of_a_fence_do_not_serve_again)
{
  begin_fenced();
  void *x = block(X, r);
  world_free(&w, x);
  world_run(&w, r);
  CHECK(block(X, r) != x); /* finds that x has completed */
  end();
}
