/* The host waits for an event, without a limit or with one. */
#include "core/order/host_wait.h"

#include "core/base/monotonic.h"
#include "core/order/retire.h"
#include "streams_world.h"

/* What host_wait.h says in words, in microseconds where it is a time. */
enum { SLICE = 10000, PATIENCE = 100, MOST = 1000, REST = 40, SECOND = 1000000 };

/* The clock stands still, so that nothing depends on how busy the machine is. */
__attribute__((constructor)) static void stop_the_clock(void)
{
  monotonic_skip(0);
}

static uint64_t limited_waits(void)
{
  return sim_calls(w.s, SIM_CALL_event_wait);
}

/* Work on the stream that waits for sim_raise_flag_now(), and its record. */
static record_t *never_yet(esper_stream stream)
{
  sim_wait_flag(w.s, 0, stream.handle, 0);
  record_t *record = stream_record(present(stream));
  CHECK(record);
  return record;
}

/* In the simulation a wait in vain takes no time. */
SIM_HOOK(pass_slice)
{
  monotonic_skip(SLICE);
}

static void wait_in_vain(record_t *record)
{
  sim_after_call(w.s, SIM_CALL_event_wait, pass_slice, NULL);
  CHECK(stream_may_be_awaited(record->stream));
  CHECK_STATUS(record_wait_trusting(record), ESPER_NOT_READY);
  sim_after_call(w.s, SIM_CALL_event_wait, NULL, NULL);
}

/* Lets everything happen. */
static void let_it_end(void)
{
  sim_raise_flag_now(w.s, 0);
  sim_run_all(w.s);
}

/* ---- until the event has completed ------------------------------------------- */

SCENE(a_limited_wait_goes_on_while_the_event_is_on_its_way)
{
  record_t *record = stream_record(present(w.stream[0]));
  sim_fail_call(w.s, SIM_CALL_event_wait, 1, ESPER_NOT_READY);
  CHECK_OK(record_wait_trusting(record));
  CHECK_EQ(limited_waits(), 2);
  CHECK(record->stream->last_wait);
  record_drop(record);
}

static int slices;

/* ---- the limit ----------------------------------------------------------------- */

static record_t *elsewhere[MOST]; /* records of another stream */
static int elsewhere_count, elsewhere_most;

/* It completes in the next slice. */
SIM_HOOK(record_elsewhere)
{
  if (elsewhere_count < elsewhere_most)
    elsewhere[elsewhere_count++] = stream_record(present(w.stream[2]));
}

/* How many slices a wait in vain takes while so many events complete, one in each. */
static uint64_t slices_beside(int events)
{
  begin();
  record_t *record = never_yet(w.stream[1]);
  elsewhere_count = 0;
  elsewhere_most = events;
  sim_after_call(w.s, SIM_CALL_event_wait, record_elsewhere, NULL);
  CHECK_STATUS(record_wait_trusting(record), ESPER_NOT_READY);
  sim_after_call(w.s, SIM_CALL_event_wait, NULL, NULL);
  uint64_t waits = limited_waits();
  let_it_end();
  record_drop(record);
  while (elsewhere_count)
    record_drop(elsewhere[--elsewhere_count]);
  end();
  return waits;
}

/* It may have nothing to do with the work that is waited for. */
TEST(what_completes_on_other_streams_prolongs_the_wait_but_not_for_ever)
{
  CHECK_EQ(slices_beside(0), PATIENCE);
  CHECK_EQ(slices_beside(1), 2 + PATIENCE);
  CHECK_EQ(slices_beside(100), 101 + PATIENCE);
  CHECK_EQ(slices_beside(MOST), MOST);
}

/* ---- after a wait in vain --------------------------------------------------------- */

SCENE(a_stream_that_is_left_alone_is_still_asked)
{
  record_t *record = never_yet(w.stream[1]);
  wait_in_vain(record);
  let_it_end();
  uint64_t before = limited_waits();
  CHECK_OK(record_wait_trusting(record));
  CHECK_EQ(limited_waits(), before);
  CHECK(stream_completed(record->stream, record->number));
  CHECK(!stream_may_be_awaited(record->stream)); /* that it was asked proves little */
  record_drop(record);
}

SCENE(after_a_wait_in_vain_a_stream_is_left_alone_forty_times_as_long)
{
  record_t *record = never_yet(w.stream[1]);
  for (int i = 0; i < 6; i++) {
    wait_in_vain(record);
    uint64_t end = monotonic_now();
    CHECK_EQ(device->rests_until - end, REST * (PATIENCE + 1) * SLICE);
    CHECK(!stream_may_be_awaited(record->stream));
    monotonic_skip(device->rests_until - end);
  }
  let_it_end();
  record_drop(record);
}

/* Ten minutes, with a wait for each stream every half a second, if it may be awaited. */
SCENE(however_many_streams_are_stuck_little_time_is_lost)
{
  enum { STUCK = 6, MINUTES = 10 };
  record_t *records[STUCK];
  for (int i = 0; i < STUCK; i++)
    records[i] = never_yet(w.stream[i + 1]);
  uint64_t begun = monotonic_now(), before = limited_waits(), first = 0;
  while (monotonic_now() - begun < (uint64_t)MINUTES * 60 * SECOND) {
    for (int i = 0; i < STUCK; i++)
      if (stream_may_be_awaited(records[i]->stream))
        wait_in_vain(records[i]);
    first = first ? first : limited_waits() - before;
    monotonic_skip(SECOND / 2);
  }
  CHECK_EQ(first, 3 * PATIENCE);
  CHECK((limited_waits() - before) * SLICE < (uint64_t)MINUTES * 60 * SECOND / 30);
  let_it_end();
  for (int i = 0; i < STUCK; i++)
    record_drop(records[i]);
}

SCENE(streams_for_which_a_wait_was_not_in_vain_are_awaited_meanwhile)
{
  record_t *good = stream_record(present(w.stream[0])), *stuck[3];
  CHECK_OK(record_wait_trusting(good));
  for (int i = 0; i < 3; i++)
    wait_in_vain(stuck[i] = never_yet(w.stream[i + 1]));
  CHECK(!stream_may_be_awaited(present(w.stream[4]).stream)); /* unknown: may be stuck as well */
  CHECK(stream_may_be_awaited(good->stream));
  record_drop(good);
  sim_wait_flag(w.s, 0, w.stream[0].handle, 1);
  good = stream_record(present(w.stream[0]));
  wait_in_vain(good);
  CHECK(!stream_may_be_awaited(good->stream));
  sim_raise_flag_now(w.s, 1);
  let_it_end();
  monotonic_skip(device->rests_until - monotonic_now());
  CHECK_OK(record_wait_trusting(good));
  record_drop(good);
  for (int i = 0; i < 3; i++)
    record_drop(stuck[i]);
}

/* The entry of a mortal stream that has ended serves another one. */
SCENE(nothing_is_known_of_a_new_stream_whoever_had_its_entry)
{
  void *x = world_malloc(&w, 512, w.stream[0]);
  esper_stream mortal = world_mortal(&w, 0);
  stream_t *entry = present(mortal).stream;
  record_t *record = stream_record(present(mortal));
  CHECK_OK(record_wait_trusting(record));
  CHECK(entry->last_wait);
  record_drop(record);
  world_destroy_stream(&w, mortal);
  esper_stream next = world_mortal(&w, 0);
  CHECK(next.handle == mortal.handle);
  CHECK(present(next).stream == entry);
  CHECK(!entry->last_wait);
  world_free(&w, x);
}

/* ---- meanwhile ------------------------------------------------------------------- */

static void do_this_and_that(void *context)
{
  (void)context;
  record_drop(stream_record(present(w.stream[1]))); /* on the very stream */
  world_free(&w, world_malloc(&w, 24 * MIB, w.stream[1]));
  CHECK(esper_core_is_valid(w.core));
}

SIM_HOOK(let_others_work)
{
  if (slices++ == 0)
    check_on_another_thread(do_this_and_that, NULL);
}

SCENE(no_lock_is_held_meanwhile)
{
  slices = 0;
  record_t *record = never_yet(w.stream[1]);
  sim_before_call(w.s, SIM_CALL_event_wait, let_others_work, NULL);
  CHECK_STATUS(record_wait_limited(record), ESPER_NOT_READY);
  CHECK(slices > 1);
  let_it_end();
  record_drop(record);
}

/* ---- errors ------------------------------------------------------------------------ */

TEST(an_error_ends_the_wait_and_is_no_wait_in_vain)
{
  for (uint64_t nth = 1; nth < 4; nth++) {
    begin();
    record_t *record = never_yet(w.stream[1]);
    sim_fail_call(w.s, SIM_CALL_event_wait, nth, ESPER_DEVICE_ERROR);
    CHECK_REFUSED(record_wait_trusting(record), ESPER_DEVICE_ERROR, "event_wait");
    CHECK_EQ(limited_waits(), nth);
    CHECK(!stream_completed(record->stream, record->number));
    CHECK(stream_may_be_awaited(record->stream));
    CHECK_EQ(record->pins, 0);
    let_it_end();
    CHECK_OK(record_wait_trusting(record));
    record_drop(record);
    end();
  }
}

TEST(a_driver_that_goes_away_ends_the_wait)
{
  begin();
  record_t *record = never_yet(w.stream[1]);
  sim_fail_call(w.s, SIM_CALL_event_wait, 2, ESPER_SHUT_DOWN);
  CHECK_STATUS(record_wait_limited(record), ESPER_SHUT_DOWN);
  CHECK_EQ(limited_waits(), 2);
  CHECK(stream_may_be_awaited(record->stream));
  record_drop(record);
  let_it_end();
  esper_core_destroy(w.core);
  sim_destroy(w.s);
}
