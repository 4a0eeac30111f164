/* Rule 6: events are immutable records. */
#include "episode.h"

/* The event that stands for S's use must not come to stand for T's. */
TEST(rule_6a_an_event_is_not_recorded_again_while_a_use_refers_to_it)
{
  begin(X + Y);
  block b[] = {take_written(X, R), take_written(Y, R)};
  read_and_mark(&b[0], S, LATE);
  read_and_mark(&b[1], T, 0);
  give(&b[0]);
  b[0] = take_written(X, R);
  END(&b[0], &b[1]);
}

TEST(rule_6b_a_failed_query_satisfies_nothing)
{
  begin(X);
  block x = take_written(X, R);
  read_and_mark(&x, S, LATE);
  give(&x);
  refuse_queries(true);
  esper_retire(p.core, 0);
  x = take_written(X, R);
  refuse_queries(false);
  END(&x);
}
