/* The steps of malloc in which the GPU waits: pending blocks, runs of neighbours, and reuse order
 * `auto`. */
#include "core/requests/malloc_gate.h"

#include "core/order/device.h"
#include "malloc_world.h"

TEST(gate_order_waits_on_the_gpu_not_on_the_host)
{
  begin();
  void *p = pending(12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  CHECK_EQ(calls(SIM_CALL_event_synchronize) + calls(SIM_CALL_device_synchronize), 0);
  CHECK(sim_pending(w.s, 0, s.handle) > 0);
  end();
}

TEST(a_gate_serves_for_all_earlier_uses_of_the_stream)
{
  begin();
  void *p = pending(12 * MIB), *q = pending(14 * MIB);
  CHECK(world_malloc(&w, 14 * MIB, r) == q); /* the later use */
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  CHECK_EQ(calls(SIM_CALL_stream_wait), 1);
  end();
}

TEST(grow_order_takes_new_memory_first)
{
  begin_with(1024 * MIB, ESPER_REUSE_GROW);
  void *p = pending(12 * MIB), *q = world_malloc(&w, 12 * MIB, r);
  CHECK(p != q);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 0);
  end();
}

TEST(grow_order_gates_when_memory_is_short)
{
  begin_with(12 * MIB, ESPER_REUSE_GROW);
  void *p = pending(12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  CHECK_EQ(calls(SIM_CALL_event_synchronize) + calls(SIM_CALL_device_synchronize), 0);
  end();
}

TEST(other_heaps_are_gated_on_when_memory_is_short)
{
  begin_with(12 * MIB, ESPER_REUSE_GATE);
  void *p = block(12 * MIB, r);
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, t) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  CHECK_EQ(calls(SIM_CALL_device_synchronize), 0);
  end();
}

TEST(a_gate_that_is_refused_leaves_the_block_pending)
{
  begin();
  void *p = pending(12 * MIB);
  sim_fail_call(w.s, SIM_CALL_stream_wait, 1, ESPER_DEVICE_ERROR);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  CHECK_EQ(sim_faults(w.s), 1);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 0);
  CHECK_EQ(world_counters(&w, 0).bytes_pending, 12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  end();
}

/* All of them are waited for and counted. */
TEST(of_many_gates_for_one_malloc_the_first_are_logged)
{
  begin();
  void *p = block(12 * MIB, r);
  for (int i = 0; i < LOGGED_GATES + 3; i++) {
    esper_stream reader = world_stream(&w, 0);
    world_read_on(&w, reader, p, r);
    world_use(&w, p, reader, 0);
  }
  world_free(&w, p);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, LOGGED_GATES + 3);
  esper_gate_entry *entries;
  size_t count;
  CHECK_OK(wait_log_copy(&w.core->devices[0], &entries, &count));
  CHECK_EQ(count, LOGGED_GATES);
  for (size_t i = 0; i < count; i++)
    CHECK(entries[i].size == 12 * MIB && entries[i].waiting == r.handle);
  free(entries);
  end();
}

/* ---- runs ----------------------------------------------------------------- */

TEST(neighbours_that_are_pending_serve_together)
{
  begin();
  void *a = block(6 * MIB, r), *b = block(6 * MIB, r), *c = block(8 * MIB, r);
  read_and_free(a, s);
  read_and_free(b, t);
  CHECK(world_malloc(&w, 10 * MIB, r) == a);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 2);
  world_check(&w);
  CHECK(world_malloc(&w, 2 * MIB, r) == (char *)b + 4 * MIB); /* the rest */
  world_kernel(&w, r, c);
  end();
}

/* The later read of the two. */
TEST(a_run_waits_once_for_a_stream_that_read_several_of_its_blocks)
{
  begin();
  void *a = block(6 * MIB, r), *b = block(6 * MIB, r), *c = block(8 * MIB, r);
  read_and_free(a, s);
  read_and_free(b, s);
  read_and_free(c, s);
  CHECK(world_malloc(&w, 20 * MIB, r) == a);
  CHECK_EQ(calls(SIM_CALL_stream_wait), 1);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  CHECK_EQ(world_counters(&w, 0).gates_skipped, 2);
  end();
}

TEST(a_single_block_is_preferred_to_a_run)
{
  begin();
  void *a = block(6 * MIB, r), *b = block(6 * MIB, r), *c = pending(30 * MIB);
  read_and_free(a, s);
  read_and_free(b, s);
  CHECK(world_malloc(&w, 11 * MIB, r) == c);
  end();
}

TEST(a_run_may_have_ready_blocks)
{
  begin();
  void *a = block(6 * MIB, r), *b = block(6 * MIB, r), *c = block(8 * MIB, r);
  world_free(&w, a);
  read_and_free(b, s);
  world_free(&w, c);
  CHECK(world_malloc(&w, 20 * MIB, r) == a);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  world_check(&w);
  end();
}

TEST(a_live_block_ends_a_run)
{
  begin();
  void *a = block(6 * MIB, r), *b = block(2 * MIB, r), *c = block(12 * MIB, r);
  read_and_free(a, s);
  read_and_free(c, s);
  CHECK(world_malloc(&w, 14 * MIB, r) != a);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 2);
  world_kernel(&w, r, b);
  end();
}

TEST(a_block_that_may_not_be_gated_ends_a_run)
{
  begin();
  void *a = block(6 * MIB, r), *b = block(6 * MIB, r), *c = block(8 * MIB, r);
  read_and_free(a, s);
  world_read_on(&w, t, b, r);
  world_use(&w, b, t, ESPER_USE_NO_GATE);
  world_free(&w, b);
  read_and_free(c, s);
  CHECK(world_malloc(&w, 11 * MIB, r) != a);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 2);
  sim_run_all(w.s);
  end();
}

TEST(the_smallest_run_is_taken)
{
  begin();
  static const size_t SIZE[2][3] = {{6, 7, 7}, {5, 5, 10}}; /* two segments */
  void *p[2][3];
  for (int i = 0; i < 6; i++)
    p[i / 3][i % 3] = block(SIZE[i / 3][i % 3] * MIB, r);
  for (int i = 0; i < 5; i++)
    read_and_free(p[i / 3][i % 3], s);
  CHECK(world_malloc(&w, 10 * MIB, r) == p[1][0]);
  CHECK(world_malloc(&w, 13 * MIB, r) == p[0][0]);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 2);
  end();
}

/* Asking the driver for memory takes tens of microseconds; a search may not. */
TEST(the_search_for_a_run_is_short)
{
  begin();
  enum { MANY = 4096 }; /* they fill a segment */
  void *p[MANY];
  for (int i = 0; i < MANY; i++)
    p[i] = block(512, r);
  for (int i = 0; i < MANY; i++)
    read_and_free(p[i], s);
  CHECK(world_malloc(&w, 64 * KIB, r) == p[0]);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  CHECK(world_malloc(&w, 256 * KIB, r));
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 2);
  world_check(&w);
  end();
}

/* Many small blocks that have been pending for longer are not in the way. */
TEST(a_run_of_large_blocks_is_found_among_small_ones)
{
  begin();
  enum { MANY = 600 };
  void *small[MANY];
  for (int i = 0; i < MANY; i++)
    small[i] = block(512, r);
  void *a = block(6 * MIB, r), *b = block(6 * MIB, r), *c = block(8 * MIB, r);
  for (int i = 0; i < MANY; i++)
    read_and_free(small[i], s);
  read_and_free(a, s);
  read_and_free(b, s);
  CHECK(world_malloc(&w, 12 * MIB, r) == a);
  world_kernel(&w, r, c);
  end();
}

TEST(a_run_whose_wait_is_refused_stays_as_it_was)
{
  begin();
  void *a = block(6 * MIB, r), *b = block(6 * MIB, r), *c = block(8 * MIB, r);
  read_and_free(a, s);
  read_and_free(b, t);
  read_and_free(c, t);
  size_t pending_bytes = world_counters(&w, 0).bytes_pending;
  sim_fail_call(w.s, SIM_CALL_stream_wait, 2, ESPER_DEVICE_ERROR);
  CHECK(world_malloc(&w, 16 * MIB, r) != a);
  CHECK_EQ(sim_faults(w.s), 1);
  world_check(&w);
  /* The first wait stands, and made one ready. */
  CHECK_EQ(world_counters(&w, 0).bytes_pending, pending_bytes - 6 * MIB);
  CHECK(world_malloc(&w, 20 * MIB, r) == a);
  end();
}

TEST(a_run_of_another_heap_is_gated_on_when_memory_is_short)
{
  begin_with(20 * MIB, ESPER_REUSE_GATE);
  void *a = block(6 * MIB, r), *b = block(6 * MIB, r), *c = block(8 * MIB, r);
  read_and_free(a, s);
  read_and_free(b, s);
  CHECK(world_malloc(&w, 10 * MIB, t) == a);
  CHECK_EQ(calls(SIM_CALL_device_synchronize) + calls(SIM_CALL_event_synchronize), 0);
  CHECK_EQ(world_counters(&w, 0).loans, 1);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 2); /* s, and r's owner order */
  world_kernel(&w, r, c);
  end();
}

/* ---- reuse order auto ----------------------------------------------------- */

static const size_t LARGE = (size_t)64 << 30; /* a 16th of it is far more than the allowance */

static void begin_auto(size_t capacity)
{
  begin_with(capacity, ESPER_REUSE_AUTO);
}

static uint64_t gates(void)
{
  return world_counters(&w, 0).gates_issued;
}

TEST(auto_order_grows_while_little_is_pending)
{
  begin_auto(LARGE);
  void *p = pending(50 * MIB), *q = pending(50 * MIB);
  CHECK(p != q);
  CHECK(world_malloc(&w, 28 * MIB, r) != p); /* 128 MiB with the request */
  CHECK_EQ(gates(), 0);
  end();
}

TEST(auto_order_gates_on_the_oldest_block_once_much_is_pending)
{
  begin_auto(LARGE);
  void *p[3];
  for (int i = 0; i < 3; i++)
    p[i] = pending(40 * MIB);
  CHECK_EQ(gates(), 0);
  CHECK(world_malloc(&w, 39 * MIB, r) == p[0]);
  CHECK_EQ(gates(), 1);
  end();
}

/* The stream would wait for all that is enqueued, and the GPU would do one thing at a time. */
TEST(auto_order_does_not_wait_for_the_latest_work)
{
  begin_auto(LARGE);
  void *p[3];
  for (int i = 0; i < 3; i++) {
    p[i] = world_malloc(&w, 300 * MIB, r);
    CHECK(i < 1 || p[i] != p[0]);
    CHECK(i < 2 || p[i] != p[1]);
    CHECK_EQ(gates(), 0);
    read_and_free(p[i], s);
  }
  CHECK(world_malloc(&w, 300 * MIB, r) == p[0]); /* two are younger now */
  CHECK_EQ(gates(), 1);
  end();
}

/* A better fit among the latest does not make the heap grow while an older block fits. */
TEST(auto_order_waits_for_an_older_block_rather_than_grow)
{
  begin_auto(LARGE);
  void *oldest = pending(320 * MIB);
  pending(310 * MIB);
  pending(300 * MIB);
  CHECK(world_malloc(&w, 300 * MIB, r) == oldest);
  CHECK_EQ(gates(), 1);
  end();
}

TEST(auto_order_leaves_no_more_than_a_16th_of_the_device_pending)
{
  begin_auto(16 * 100 * MIB);
  void *p = pending(50 * MIB);
  CHECK(world_malloc(&w, 50 * MIB, r) != p);
  CHECK_EQ(gates(), 0);
  CHECK(world_malloc(&w, 51 * MIB, r) != p); /* too large for p */
  void *q = pending(52 * MIB);
  CHECK(world_malloc(&w, 50 * MIB, r) == p);
  CHECK_EQ(gates(), 1);
  CHECK(world_malloc(&w, 50 * MIB, r) == q);
  end();
}

TEST(auto_order_leaves_no_more_than_a_16th_of_the_memory_fraction_pending)
{
  begin_auto(64 * 100 * MIB);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.25));
  void *p = pending(52 * MIB);
  CHECK(world_malloc(&w, 50 * MIB, r) == p);
  CHECK_EQ(gates(), 1);
  end();
}

/* It serves nobody before it has completed, so waiting for other memory would not help. */
TEST(auto_order_does_not_count_memory_that_it_may_not_gate_on)
{
  begin_auto(LARGE);
  void *p = block(300 * MIB, r), *q;
  world_record_stream(&w, p, s);
  world_free(&w, p);
  for (int i = 0; i < 3; i++)
    q = pending(30 * MIB);
  CHECK(world_malloc(&w, 30 * MIB, r) != q);
  CHECK_EQ(gates(), 0);
  end();
}

TEST(auto_order_gates_when_growth_would_pass_the_memory_fraction)
{
  begin_auto(640 * MIB);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 1.0 / 32)); /* 20 MiB */
  void *p = pending(12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  end();
}

/* The driver is asked once, not each time. */
TEST(auto_order_gates_when_the_device_is_full)
{
  begin_auto(1000 * MIB);
  void *neighbour = block(980 * MIB, t);
  void *p = pending(12 * MIB);
  uint64_t asked = calls(SIM_CALL_memory_alloc);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), asked + 1); /* that was refused */
  for (int i = 0; i < 5; i++) {
    read_and_free(p, s);
    CHECK(world_malloc(&w, 12 * MIB, r) == p);
  }
  CHECK_EQ(calls(SIM_CALL_memory_alloc), asked + 1);
  CHECK_EQ(gates(), 6);
  /* What is given back makes it worth asking again. */
  world_free(&w, p);
  world_free(&w, neighbour);
  sim_run_all(w.s);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  p = pending(12 * MIB);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  end();
}

/* ---- which block ------------------------------------------------------------ */

TEST(of_blocks_that_fit_about_equally_well_the_oldest_is_gated_on)
{
  begin();
  void *p[3];
  size_t mib[] = {13, 12, 14};
  for (int i = 0; i < 3; i++)
    p[i] = block(mib[i] * MIB, r);
  for (int i = 0; i < 3; i++)
    read_and_free(p[i], s);
  CHECK(world_malloc(&w, 12 * MIB, r) == p[0]); /* within an eighth of the best fit */
  CHECK(world_malloc(&w, 12 * MIB, r) == p[1]); /* p[2] is not, and younger */
  end();
}

TEST(a_much_better_fit_is_gated_on_though_it_is_younger)
{
  begin();
  void *large = block(16 * MIB, r), *fits = block(12 * MIB, r);
  read_and_free(large, s);
  read_and_free(fits, s);
  CHECK(world_malloc(&w, 12 * MIB, r) == fits);
  end();
}

static void begin_a_collective(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)call, (void)device, (void)object;
  if (!sim_pending(w.s, 0, s.handle))
    sim_wait_flag(w.s, 0, s.handle, 0);
}

static void run_s(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)call, (void)device, (void)object;
  world_run(&w, s);
}

static void note_warning(void *context, const char *text)
{
  CHECK(strstr(text, "a CUDA graph capture was ended"));
  ++*(int *)context;
}

/* r would get x, free memory of t, if an event stood for all streams. Whether the capture of a
 * stream that the core has not met survives that malloc. */
static bool capture_survives(void)
{
  void *x = block(12 * MIB, t);
  world_free(&w, x);
  sim_capture_begin(w.s, 0, w.stream[3].handle);
  void *p = world_malloc(&w, 12 * MIB, r);
  bool survives = sim_capture_is_valid(w.s, 0, w.stream[3].handle);
  CHECK(p != x);
  sim_capture_abort(w.s, 0, w.stream[3].handle);
  return survives;
}

/* Nobody announces it, so nothing tells that the event will end it. */
TEST(who_captures_a_stream_that_the_core_has_not_met_is_told_how_to_announce_it)
{
  int warnings = 0;
  esper_config config = {.reuse_order = ESPER_REUSE_GATE,
                         .warn = note_warning,
                         .warn_context = &warnings};
  sim_options options = {.completion = SIM_WHEN_TOLD};
  world_begin_with(&w, &options, &config);
  r = w.stream[0], s = w.stream[1], t = w.stream[2];
  CHECK(!capture_survives());
  CHECK(!capture_survives());
  CHECK_EQ(warnings, 1);
  end();
}

/* Then nobody synchronises the device. */
TEST(an_announced_capture_survives_that_memory_runs_out)
{
  begin_with(12 * MIB, ESPER_REUSE_GATE);
  void *x = block(12 * MIB, t), *p;
  world_free(&w, x);
  CHECK_OK(esper_capture_begin(w.core, 0));
  sim_capture_begin(w.s, 0, w.stream[3].handle);
  CHECK_STATUS(esper_malloc(w.core, 12 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK(sim_capture_is_valid(w.s, 0, w.stream[3].handle));
  sim_capture_abort(w.s, 0, w.stream[3].handle);
  CHECK_OK(esper_capture_end(w.core, 0));
  CHECK(world_malloc(&w, 12 * MIB, r) == x);
  end();
}

TEST(an_announced_capture_of_a_stream_that_the_core_has_not_met_survives)
{
  for (int all = 0; all < 2; all++) {
    esper_config config = {.reuse_order = ESPER_REUSE_GATE, .captures_are_announced = all};
    world_begin_with(&w, &(sim_options){.completion = SIM_WHEN_TOLD}, &config);
    r = w.stream[0], s = w.stream[1], t = w.stream[2];
    CHECK_OK(esper_capture_begin(w.core, 0));
    CHECK(capture_survives());
    CHECK_EQ(calls(SIM_CALL_event_record_all), 0);
    CHECK_OK(esper_capture_end(w.core, 0));
    CHECK(!capture_survives());
    end();
  }
}

/* Another thread gives s work that waits for r, while r asks for the memory of t. */
TEST(a_collective_that_begins_meanwhile_is_not_waited_for)
{
  begin_with(12 * MIB, ESPER_REUSE_GATE);
  CHECK_OK(esper_stream_set_traits(w.core, s, ESPER_TRAIT_RENDEZVOUS));
  void *x = block(12 * MIB, t);
  world_read_on(&w, w.stream[3], x, t);
  world_use(&w, x, w.stream[3], 0);
  world_free(&w, x);
  sim_before_call(w.s, SIM_CALL_event_record_all, begin_a_collective, NULL);
  sim_before_call(w.s, SIM_CALL_event_query, run_s, NULL);
  void *p;
  CHECK_STATUS(esper_malloc(w.core, 12 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  sim_before_call(w.s, SIM_CALL_event_record_all, NULL, NULL);
  sim_before_call(w.s, SIM_CALL_event_query, NULL, NULL);
  sim_run_all(w.s);
  CHECK_EQ(sim_pending(w.s, 0, r.handle), 0);
  sim_raise_flag_now(w.s, 0);
  end();
}
