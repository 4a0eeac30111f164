/* Rule 3: owner order has a position. */
#include "episode.h"

TEST(rule_3_an_event_from_before_the_free_does_not_cover_it)
{
  begin(X + 2 * MIB);
  block x = take(X, O);
  record_something(O, R);
  drain_both(R, O); /* the event has completed */
  write_late(&x);
  give(&x);
  esper_retire(p.core, 0);
  x = take_written(X, R);
  END(&x);
}

/* The last malloc of O opens the block cache, so the free after it takes no lock. */
TEST(rule_3b_a_free_without_the_lock_is_not_covered_by_an_earlier_event)
{
  begin(X + 2 * MIB);
  block x = take(X, O);
  void *at = give(&x);
  record_something(O, R);
  drain_both(R, O);
  x = take(X, O);
  CHECK(x.at == at);
  write_late(&x);
  give(&x);
  esper_retire(p.core, 0);
  x = take_written(X, R);
  END(&x);
}

/* R waits for S, which reads late, after the free. O wants the memory before that. */
TEST(rule_3c_another_stream_waits_for_all_streams)
{
  begin(X);
  block x = take_written(X, R);
  read_on(&x, S, LATE);
  machine_sync(handle(R));
  give(&x);
  x = take_written(X, O);
  machine_wait(handle(R), handle(S));
  END(&x);
}

/* S reads memory of R that is freed without a mark. R waits for S later, but before it touches
 * memory again: under PyTorch's own allocator that is in time. R's own work is done. */
static void *read_and_free(void)
{
  block x = take_written(X, R);
  read_on(&x, S, LATE);
  void *at = give(&x);
  record_something(R, O);
  drain_both(O, R);
  return at;
}

TEST(rule_3c_its_own_stream_waits_for_nobody)
{
  begin(2 * X + 2 * Y);
  void *at = read_and_free();
  block y = take_written(X, T);
  machine_wait(handle(R), handle(S));
  block x = take_written(X, R);
  CHECK_SIM(x.at == at); /* its own stream needs no event */
  END(&x, &y);
}

TEST(rule_3c_lent_memory_that_comes_back_waits_for_all_streams)
{
  begin(20 * MIB);
  block a = take_written(9 * MIB, R), b = take_written(9 * MIB, R);
  void *at = give(&a);
  machine_sync(handle(R));
  a = take_written(9 * MIB, T); /* b keeps the segment R's */
  CHECK(a.at == at);
  read_on(&a, S, LATE);
  give(&a);
  machine_sync(handle(T));
  a = take_written(9 * MIB, R);
  END(&a, &b);
}

TEST(rule_3c_pages_stay_until_all_streams_have_left_the_free_behind)
{
  begin_mapped(64 * MIB);
  read_and_free();
  block y = take_written(40 * MIB, T);
  machine_wait(handle(R), handle(S));
  END(&y);
}

/* O reads x, and nobody says so: S waits for that after the free, and later than R for S. */
TEST(rule_3c_inside_a_capture_a_branch_gets_no_memory_of_another)
{
  for (int with_pool = 0; with_pool < 2; with_pool++) {
    begin(64 * MIB);
    if (with_pool)
      pool_open();
    capture_begin(R);
    machine_wait(handle(S), handle(R));
    block x = take_written(X, S);
    read_on(&x, O, LATE);
    void *at = give(&x);
    machine_wait(handle(R), handle(S));
    x = first_on_T(X);
    CHECK(x.at != at);
    machine_wait(handle(S), handle(O));
    block y = take_written(X, S);
    CHECK(y.at == at);
    machine_wait(handle(R), handle(S));
    machine_wait(handle(R), handle(T));
    capture_launch(R);
    if (with_pool)
      pool_close(), pool_release(1);
    END(&x, &y);
  }
}

/* S reads memory of R, which waits for S only after the free: T may not have it meanwhile. */
TEST(rule_3c_inside_a_capture_others_come_after_all_branches)
{
  begin(64 * MIB);
  capture_begin(R);
  block x = take_written(X, R), known = take(512, S);
  give(&known); /* the core has met S */
  read_on(&x, S, LATE);
  give(&x);
  machine_wait(handle(T), handle(R));
  x = take_written(X, T);
  machine_wait(handle(R), handle(S));
  machine_wait(handle(R), handle(T));
  capture_launch(R);
  END(&x);
}
