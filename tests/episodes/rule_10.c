/* Rule 10: how long the host waits. */
#include <time.h>

#include "episode.h"

static double seconds(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The host is held back by S, which waits for what the host has yet to enqueue: it gives up. Then R
 * is given memory once more. Returns whether that came while S was left alone: for 0.4 s, and forty
 * times as long as the wait took. */
static bool hold_back_in_vain(marked how)
{
  begin_held_back();
  block b[3];
  for (int i = 0; i < 3; i++)
    b[i] = take_written(X, R);
  machine_wait(handle(S), handle(R));
  machine_stall(handle(S));
  for (int i = 0; i < 3; i++) {
    check_on(&b[i], S, 0);
    mark_by(how, &b[i], S);
    give(&b[i]);
  }
  limit_waits(500); /* five times what a wait in vain takes */
  b[0] = take_written(X, R);
  esper_counters counters = counters_now();
  CHECK_EQ(counters.held_back_in_vain, 1);
  double given_up = seconds();
  b[1] = take_written(X, R);
  bool in_time = seconds() - given_up < 0.3 + 30e-6 * (double)counters.held_back_us;
  limit_waits(-1);
  return in_time;
}

TEST(rule_10a_a_wait_for_work_that_waits_for_this_host_ends)
{
  static const marked HOW[] = {BY_MARK, BY_RECORD_STREAM, BY_EVENT};
  for (int i = 0; i < 3; i++) {
    hold_back_in_vain(HOW[i]);
    machine_let_go(handle(R));
    END();
  }
}

TEST(rule_10b_a_stream_that_was_waited_for_in_vain_is_left_alone)
{
  if (hold_back_in_vain(BY_MARK))
    CHECK_EQ(counters_now().held_back, 1);
  machine_let_go(handle(R));
  END();
}
