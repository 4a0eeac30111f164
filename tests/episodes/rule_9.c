/* Rule 9: when in doubt, hold. */
#include "episode.h"

/* The reader is gone; in its place, with its handle, may be another. */
static void reader_is_gone(bool replaced)
{
  begin(X);
  int mortal = mortal_stream();
  block x = take_written(X, R);
  mark_until_free(&x, mortal);
  read_on(&x, mortal, LATE);
  destroy_stream(mortal);
  if (replaced)
    replace_stream(mortal);
  void *at = give(&x);
  x = take_written(X, R); /* the host waits for the device */
  CHECK(x.at == at);
  END(&x);
}

TEST(rule_9a_a_use_that_cannot_be_recorded_holds_its_block)
{
  reader_is_gone(false);
}

TEST(rule_9b_a_destroyed_streams_handle_is_another_streams)
{
  reader_is_gone(true);
}

/* The stream that wrote the memory last is gone, and still at work; the one that has its handle
 * asks for as much. */
TEST(rule_9c_the_next_stream_of_a_handle_gets_nothing_of_the_last)
{
  begin(64 * MIB);
  int mortal = mortal_stream();
  block x = take(X, mortal);
  write_late(&x);
  give(&x);
  destroy_stream(mortal);
  replace_stream(mortal);
  x = take_written(X, mortal);
  machine_delay(handle(mortal), 2 * LATE);
  check_on(&x, mortal, 0);
  END(&x);
}

/* S reads late before anybody observes. */
TEST(rule_9d_memory_that_is_live_when_an_observer_begins_waits_for_every_stream)
{
  begin(64 * MIB);
  block x = take_written(X, R);
  read_on(&x, S, LATE);
  CHECK_OK(esper_note_unseen_uses(p.core));
  give(&x);
  x = take_written(X, R);
  END(&x);
}

#ifdef MACHINE_SIM
/* ---- handles that come back at once ----------------------------------------- */

/* The stream that has the handle now says nothing of the one that had it. */
TEST(rule_9c_a_stream_that_has_ended_keeps_what_it_is_owed)
{
  begin(X + 2 * MIB);
  int mortal = mortal_stream();
  void *was = handle(mortal);
  block x = take_written(X, R), y = take(512, R);
  mark_until_free(&x, mortal);
  read_on(&x, mortal, 0);
  destroy_stream(mortal);
  void *at = give(&x); /* held */
  replace_stream(mortal);
  CHECK(handle(mortal) == was);
  mark(&y, mortal, 0);
  machine_sync(handle(mortal));
  esper_retire(p.core, 0);
  CHECK_EQ(counters_now().blocks_held, 1);
  x = take_written(X, R);
  CHECK(x.at == at); /* the host waits */
  END(&x);
}
#endif
