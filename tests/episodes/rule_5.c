/* Rule 5: at most one use for each stream. */
#include "episode.h"

TEST(rule_5a_marks_in_a_loop_leave_one_use_a_stream)
{
  begin(0);
  block x = take_written(X, R);
  for (int i = 0; i < 100; i++) {
    read_and_mark(&x, S, 10);
    mark_until_free(&x, T);
  }
  CHECK(counters_now().uses_pending <= 2);
  CHECK_SIM(counters_now().events_alive <= 8);
  END(&x);
}

/* The first mark has completed, but nobody asked. */
TEST(rule_5b_the_later_use_on_a_stream_replaces_the_earlier)
{
  begin(X);
  block x = take_written(X, R);
  read_and_mark(&x, S, 0);
  machine_sync(handle(R));
  machine_sync(handle(S));
  read_and_mark(&x, S, LATE);
  give(&x);
  esper_retire(p.core, 0);
  x = take_written(X, R);
  END(&x);
}

TEST(rule_5c_completed_uses_leave)
{
  begin(0);
  block x = take_written(X, R);
  for (int reader = S; reader <= T; reader++) {
    read_and_mark(&x, reader, 0);
    machine_sync(handle(reader));
  }
  esper_retire(p.core, 0);
  read_and_mark(&x, O, LATE);
  CHECK(counters_now().uses_pending <= 1);
  END(&x);
}

/* S reads again after the marks, as backward does: two marks of any kind, of which one lasts until
 * the free, are one use that does. */
static void mark_twice(marked first, marked second)
{
  begin(X);
  block x = take_written(X, R);
  read_on(&x, S, 0);
  mark_by(first, &x, S);
  mark_by(second, &x, S);
  CHECK_EQ(counters_now().uses_pending, 1);
  read_on(&x, S, LATE);
  give(&x);
  x = take_written(X, R);
  END(&x);
}

TEST(rule_5d_a_mark_until_the_free_lasts_until_the_free)
{
  for (marked first = 0; first < BY_EVENT; first++)
    for (marked second = 0; second < BY_EVENT; second++)
      if (first != BY_MARK || second != BY_MARK)
        mark_twice(first, second);
}

#ifdef MACHINE_SIM
/* ---- nothing grows, whatever completes when --------------------------------- */

static void pipeline_step(void)
{
  block x = take_written(X, R);
  read_and_mark(&x, S, 0);
  read_and_mark(&x, T, 0);
  give(&x);
  machine_pause(5);
}

TEST(rule_5c_a_steady_loop_grows_nothing)
{
  begin(2 * X);
  for (int i = 0; i < 100; i++)
    pipeline_step();
  machine_finish();
  esper_counters before = counters_now();
  for (int i = 0; i < 2000; i++)
    pipeline_step();
  machine_finish();
  esper_counters after = counters_now();
  CHECK(after.uses_pending <= 4); /* two blocks, two readers */
  CHECK_EQ(after.events_created, before.events_created);
  CHECK_EQ(after.metadata_bytes, before.metadata_bytes);
  END();
}
#endif
