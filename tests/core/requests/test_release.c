/* garbage_collection_threshold: before memory grows beyond a share of the limit, cached segments
 * that have not been used for long go back. */
#include <stdbool.h>

#include "one_world.h"

enum { CAPACITY = 1000 };

static void begin_with(double fraction, sim_completion completion, bool pages)
{
  begin_on((sim_options){.oracle = SIM_ORACLE_KNOWN,
                         .completion = completion,
                         .virtual_memory = pages,
                         .capacity = CAPACITY * MIB},
           NULL);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, fraction));
}

static void begin(double fraction, sim_completion completion)
{
  begin_with(fraction, completion, false);
}

static void set_threshold(double threshold)
{
  esper_config config = {.garbage_collection_threshold = threshold};
  CHECK_OK(esper_configure(w.core, &config));
}

static void *get(size_t mib, esper_stream stream)
{
  void *p = world_malloc(&w, mib * MIB, stream);
  world_kernel(&w, stream, p);
  return p;
}

/* Segments of 60, 50 and 40 MiB, freed in that order, and one of 20 that is live;
 * between the frees large requests, which are the clock. */
static void cache_three(void)
{
  void *p[3] = {get(60, r), get(50, r), get(40, r)};
  get(2, s);
  for (int i = 0; i < 3; i++) {
    world_free(&w, p[i]);
    world_free(&w, get(3, s));
  }
  CHECK_EQ(reserved_mib(), 170);
}

/* The first round takes what is older than the average, of one that is very old; that is
 * not enough, and the next goes by the average of the others. */
SCENE_WITH(segments_go_back_in_rounds_until_enough_is_free, begin(0.5, SIM_AT_ONCE))
{
  set_threshold(0.2); /* of 500 MiB */
  void *p[3] = {get(40, r), get(50, r), get(60, r)};
  get(2, s);
  for (int i = 0; i < 3; i++) {
    world_free(&w, p[i]);
    for (int k = 0; k < (i ? 1 : 20); k++)
      world_free(&w, get(3, s));
  }
  CHECK_EQ(reserved_mib(), 150 + 20);
  get(80, r); /* 70 MiB are too many: that of 40 goes, then that of 50 */
  CHECK_EQ(reserved_mib(), 60 + 20 + 80);
}

SCENE_WITH(a_threshold_that_is_set_later_counts_from_there, begin(0.5, SIM_AT_ONCE))
{
  void *late = get(50, r), *early = get(60, r);
  world_free(&w, get(2, r)); /* r's frees go without the device's lock now */
  set_threshold(0.2);
  world_free(&w, early);
  world_free(&w, get(3, s));
  world_free(&w, late);
  CHECK_EQ(reserved_mib(), 50 + 60 + 20);
  get(80, r); /* 30 MiB are too many: those of 60 go */
  CHECK_EQ(reserved_mib(), 50 + 20 + 80);
}

SCENE_WITH(using_a_segment_makes_it_young, begin(0.5, SIM_AT_ONCE))
{
  set_threshold(0.2);
  cache_three();
  world_free(&w, get(55, r)); /* in the one of 60 */
  CHECK_EQ(reserved_mib(), 170);
  get(80, r); /* 50 and 40 are the oldest now */
  CHECK_EQ(reserved_mib(), 60 + 20 + 80);
  get(58, r);
  CHECK_EQ(reserved_mib(), 60 + 20 + 80);
}

TEST(segments_go_back_early_only_with_a_limit_and_a_threshold)
{
  for (int i = 0; i < 2; i++) {
    begin(i ? 0.5 : 1, SIM_AT_ONCE);
    cache_three();
    set_threshold(i ? 0 : 0.01);
    get(80, r);
    CHECK_EQ(reserved_mib(), 250);
    world_end(&w);
  }
}

/* Nobody waits for the sake of a threshold. */
SCENE_WITH(what_is_still_used_stays, begin(0.5, SIM_WHEN_TOLD))
{
  cache_three();
  set_threshold(0.2);
  get(80, r); /* r has not begun yet */
  CHECK_EQ(reserved_mib(), 250);
  world_run(&w, r);
  get(90, r); /* s has not */
  CHECK_EQ(reserved_mib(), 340);
  world_run(&w, s);
  world_run(&w, r);
  world_free(&w, get(100, r)); /* that all are done with them, an event of the last time says */
  CHECK_EQ(reserved_mib(), 20 + 80 + 90 + 100);
}

/* An idle stream takes a moment for the event by which it is asked. */
static void run_after_a_moment(void *questions, sim_call call, int device, void *object)
{
  (void)call, (void)device, (void)object;
  if (++*(int *)questions == 20)
    world_run(&w, s);
}

SCENE_WITH(an_idle_stream_is_given_a_moment_to_answer, begin(0.5, SIM_WHEN_TOLD))
{
  int questions = 0;
  cache_three();
  set_threshold(0.2);
  world_run(&w, r);
  sim_before_call(w.s, SIM_CALL_event_query, run_after_a_moment, &questions);
  get(80, r);
  sim_before_call(w.s, SIM_CALL_event_query, NULL, NULL);
  CHECK(questions >= 20);
  CHECK_EQ(reserved_mib(), 20 + 80); /* nothing is cached any more */
}

/* Their free pages are what the next request grows by. */
SCENE_WITH(mapped_segments_keep_theirs, begin_with(0.5, SIM_AT_ONCE, true))
{
  void *mapped = get(60, r);
  CHECK(sim_calls(w.s, SIM_CALL_page_map) > 0);
  esper_config config = {.segments = ESPER_SEGMENTS_CLASSIC, .garbage_collection_threshold = 0.01};
  CHECK_OK(esper_configure(w.core, &config));
  void *classic = get(70, r);
  world_free(&w, mapped);
  world_free(&w, classic);
  CHECK_EQ(reserved_mib(), 130);
  get(80, s);
  CHECK_EQ(reserved_mib(), 60 + 80);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_page_unmap), 0);
  CHECK(get(60, r) == mapped);
  world_check(&w);
}

SCENE_WITH(a_threshold_is_a_share, begin(1, SIM_AT_ONCE))
{
  esper_config config = {.garbage_collection_threshold = 1};
  CHECK_STATUS(esper_configure(w.core, &config), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "garbage_collection_threshold is 1"));
  config.garbage_collection_threshold = -0.5;
  CHECK_STATUS(esper_configure(w.core, &config), ESPER_INVALID);
  config = (esper_config){.rejection_share = 1.5};
  CHECK_STATUS(esper_configure(w.core, &config), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "rejection_share is 1.5"));
}
