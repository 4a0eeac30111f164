/* Rule 11: sleep. */
#include <time.h>

#include "esper_sleep.h"
#include "episode.h"

static void sleep_and_wake(void)
{
  CHECK_OK(esper_sleep(p.core, -1, NULL, 0, ESPER_KEEP_HOST, NULL));
  CHECK_OK(esper_wake(p.core, -1, NULL, 0, NULL));
}

static void rest(long milliseconds)
{
  nanosleep(&(struct timespec){0, milliseconds * 1000000}, NULL);
}

/* S writes x while it would be asleep, and nobody has marked that. */
TEST(rule_11a_pages_go_to_sleep_when_all_work_has_completed)
{
  begin_mapped(256 * MIB);
  block x = take_written(X, R);
  machine_wait(handle(S), handle(R));
  machine_delay(handle(S), 8 * LATE);
  x.writer = S;
  write_block(&x);
  CHECK_OK(esper_sleep(p.core, -1, NULL, 0, ESPER_KEEP_HOST, NULL));
  rest(100); /* so that S has written before memory wakes */
  CHECK_OK(esper_wake(p.core, -1, NULL, 0, NULL));
  END(&x);
}

/* The second graph reads what the first one left in memory that is free by now. */
TEST(rule_11b_free_memory_of_a_graph_keeps_its_contents)
{
  machine_want_contents();
  begin_mapped(64 * MIB);
  capture_begin(R);
  block x = take(X, R);
  void *at = give(&x);
  capture_end(R);
  machine_write_now(at, 4096, 'x'); /* as a replay does */
  sleep_and_wake();
  CHECK(machine_reads_now(at, 4096, 'x'));
  END();
}

TEST(rule_11c_a_page_is_unmapped_when_its_copy_has_completed)
{
  begin_mapped(256 * MIB);
  block x = take_written(X, R);
  sleep_and_wake();
  END(&x);
}

/* On a stream that the core has never met. */
TEST(rule_11d_waking_returns_when_the_contents_are_back)
{
  begin_mapped(256 * MIB);
  block x = take_written(X, R);
  sleep_and_wake();
  int fresh = mortal_stream();
  check_on(&x, fresh, 0);
  destroy_stream(fresh);
  END(&x);
}

/* x is freed asleep. Its pages are not there to move. */
TEST(rule_11e_memory_that_is_freed_asleep_serves_nothing)
{
  const char *weights = "weights";
  begin_mapped(64 * MIB);
  CHECK_OK(esper_tag_push(weights));
  block x = take_written(Y, R);
  CHECK_OK(esper_tag_pop());
  CHECK_OK(esper_sleep(p.core, -1, &weights, 1, ESPER_KEEP_HOST, NULL));
  give(&x);
  x = take_written(Y, R);
  CHECK_OK(esper_wake(p.core, -1, &weights, 1, NULL));
  END(&x);
}
