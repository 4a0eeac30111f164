/* The steps of malloc in which the GPU waits: pending blocks, runs of neighbours, and reuse order
 * `auto`. */
#include "core/requests/malloc_gate.h"

#include "core/api/testing.h"
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

static int64_t time_us;

static int64_t fake_clock(void)
{
  return time_us;
}

static void begin_auto(size_t capacity)
{
  begin_with(capacity, ESPER_REUSE_AUTO);
  core_set_clock(w.core, fake_clock);
  time_us = 1000000;
}

/* 3 ms: docs/design.md says where that comes from. */
TEST(auto_order_gates_while_the_other_stream_is_hardly_behind)
{
  begin_auto(1024 * MIB);
  void *p = pending(12 * MIB);
  time_us += 3000;
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  end();
}

TEST(auto_order_grows_when_the_other_stream_is_far_behind)
{
  begin_auto(1024 * MIB);
  void *p = pending(12 * MIB), *q = pending(14 * MIB);
  time_us += 3001;
  /* The stream's oldest mark counts, not that of the block. */
  CHECK(world_malloc(&w, 14 * MIB, r) != q);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 0);
  sim_run_all(w.s);
  CHECK(world_malloc(&w, 12 * MIB, r) == p); /* ready */
  end();
}

/* Who is as far behind as the other one does not wait for long. */
TEST(auto_order_gates_when_both_streams_are_far_behind)
{
  begin_auto(1024 * MIB);
  void *p = pending(12 * MIB), *q = block(4 * MIB, t);
  world_read_on(&w, r, q, t);
  world_use(&w, q, r, 0); /* shows how far r is */
  time_us += 50000;
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 1);
  end();
}

TEST(auto_order_gates_when_growth_would_pass_the_memory_fraction)
{
  begin_auto(64 * MIB);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.25));
  void *p = pending(12 * MIB);
  time_us += 50000;
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  end();
}

/* The driver is asked once, not each time. */
TEST(auto_order_gates_when_the_device_is_full)
{
  begin_auto(20 * MIB);
  void *p = pending(12 * MIB);
  time_us += 50000;
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 2); /* the second was refused */
  for (int i = 0; i < 5; i++) {
    world_read_on(&w, s, p, r);
    world_use(&w, p, s, 0);
    world_free(&w, p);
    time_us += 50000;
    CHECK(world_malloc(&w, 12 * MIB, r) == p);
  }
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 2);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 6);
  /* What is given back makes it worth asking again. */
  world_free(&w, p);
  sim_run_all(w.s);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_set_capacity(w.s, 0, 64 * MIB);
  p = pending(12 * MIB);
  time_us += 50000;
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  end();
}

/* Marks that were made before the order was chosen have no time: when in
 * doubt, nobody is made to wait. */
TEST(auto_order_does_not_guess)
{
  begin();
  void *p = pending(12 * MIB);
  esper_config config = {.reuse_order = ESPER_REUSE_AUTO};
  CHECK_OK(esper_configure(w.core, &config));
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  end();
}

/* Another thread may mark a use on the malloc's own stream after the malloc read the
 * clock: the mark is then newer than "now". */
TEST(auto_order_does_not_guess_beside_a_mark_newer_than_the_clock)
{
  begin();
  core_set_clock(w.core, fake_clock);
  time_us = 1000000;
  void *p = pending(12 * MIB), *q = block(4 * MIB, t); /* p's mark has no time */
  esper_config config = {.reuse_order = ESPER_REUSE_AUTO};
  CHECK_OK(esper_configure(w.core, &config));
  world_read_on(&w, r, q, t);
  world_use(&w, q, r, 0);
  time_us -= 10;
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  CHECK_EQ(world_counters(&w, 0).gates_issued, 0);
  end();
}
