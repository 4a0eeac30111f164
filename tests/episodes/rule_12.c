/* Rule 12: fences. */
#include "episode.h"

static void begin_fenced(void)
{
  begin_mapped(256 * MIB);
  CHECK_OK(esper_fence(p.core, 1));
}

/* An access after the free is noticed, whatever the stream asks for next. */
TEST(rule_12a_memory_with_a_fence_serves_once)
{
  begin_fenced();
  block x = take_written(X, R);
  CHECK_OK(esper_fence(p.core, 0));
  void *at = give(&x);
  x = take_written(X, R);
  CHECK(x.at != at);
  END(&x);
}

/* S has yet to read x, and has marked that. */
TEST(rule_12b_a_fence_is_unmapped_when_its_block_owes_nothing)
{
  begin_fenced();
  block x = take_written(X, R);
  machine_wait(handle(S), handle(R));
  machine_stall(handle(S));
  check_on(&x, S, 0);
  mark(&x, S, 0);
  give(&x);
  x = take_written(Y, R);
  machine_let_go(handle(R));
  END(&x);
}

TEST(rule_12c_addresses_of_a_fence_do_not_serve_again)
{
  begin_fenced();
  block x = take_written(X, R);
  void *at = give(&x);
  machine_sync(handle(R));
  x = take_written(X, R); /* finds that x has completed */
  CHECK(x.at != at);
  END(&x);
}
