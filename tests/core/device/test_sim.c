/* The simulated device itself. A simulation that accepts too much would make every other test
 * pass. */
#include "device/sim/sim.h"

#include <pthread.h>

#include "world.h"
#include "device/sim/state.h"

static sim *s;
static const esper_driver *d;
static char report[4096];
static int reports;

static void note(void *context, const char *text)
{
  (void)context;
  if (reports++ == 0)
    snprintf(report, sizeof report, "%s", text);
}

static void begin_with(sim_options options)
{
  s = sim_create(&options);
  CHECK(s);
  d = sim_driver(s);
  reports = 0;
  report[0] = 0;
  sim_on_failure(s, note, NULL);
}

static void begin(void)
{
  begin_with((sim_options){WHEN_TOLD});
}

static void end(void)
{
  sim_destroy(s);
  s = NULL;
}

/* The simulation has complained since the last time, saying `words`. */
static void check_complained(const char *words)
{
  if (!reports)
    check_failed(__FILE__, __LINE__, "nobody complained of %s", words);
  if (!strstr(report, words))
    check_failed(__FILE__, __LINE__, "not about %s: %s", words, report);
  reports = 0;
}

#define COMPLAINS(status, expected, words) \
  do {                                     \
    CHECK_STATUS(status, expected);        \
    check_complained(words);               \
  } while (0)

/* The last complaint says `words`, too. */
static void check_contains(const char *words)
{
  if (!strstr(report, words))
    check_failed(__FILE__, __LINE__, "not about %s: %s", words, report);
}

static void check_silent(void)
{
  if (reports)
    check_failed(__FILE__, __LINE__, "complained: %s", report);
}

static void *memory(size_t size)
{
  uintptr_t address;
  CHECK_OK(d->memory_alloc(d->self, 0, size, &address));
  return (void *)address;
}

static void *event(void)
{
  void *e;
  CHECK_OK(d->event_create(d->self, 0, &e));
  return e;
}

static void *stream(void)
{
  return sim_stream_create(s, 0);
}

static void kernel(void *st, void *p)
{
  sim_kernel(s, 0, st, p, 4096, SIM_READ | SIM_WRITE);
}

/* ---- streams, events, time ---------------------------------------------- */

SCENE(an_event_completes_when_its_stream_gets_there)
{
  void *a = stream(), *e = event();
  CHECK_OK(d->event_query(d->self, 0, e)); /* fresh */
  sim_kernel(s, 0, a, NULL, 0, SIM_READ);
  CHECK_OK(d->event_record(d->self, 0, e, a));
  CHECK_STATUS(d->event_query(d->self, 0, e), ESPER_NOT_READY);
  CHECK_EQ(sim_run_stream(s, 0, a, 1), 1);
  CHECK_STATUS(d->event_query(d->self, 0, e), ESPER_NOT_READY);
  CHECK_EQ(sim_run_stream(s, 0, a, 5), 1);
  CHECK_OK(d->event_query(d->self, 0, e));
}

SCENE(a_destroyed_event_may_still_be_waited_for)
{
  void *a = stream(), *b = stream(), *e = event();
  CHECK_OK(d->event_record(d->self, 0, e, a));
  CHECK_OK(d->stream_wait(d->self, 0, b, e));
  CHECK_OK(d->event_destroy(d->self, 0, e));
  CHECK_EQ(sim_run_stream(s, 0, b, 9), 0);
  CHECK_EQ(sim_run_all(s), 2);
  COMPLAINS(d->event_query(d->self, 0, e), ESPER_DEVICE_ERROR, "is no event");
}

TEST(the_seeded_scheduler_lets_time_pass_and_repeats)
{
  size_t left[2];
  for (int round = 0; round < 2; round++) {
    begin_with((sim_options){.completion = SIM_SEEDED, .seed = 7});
    void *a = stream(), *b = stream(), *e = event();
    for (int i = 0; i < 200; i++) {
      sim_kernel(s, 0, i % 3 ? a : b, NULL, 0, SIM_READ);
      CHECK_OK(d->event_record(d->self, 0, e, a));
      d->event_query(d->self, 0, e);
    }
    left[round] = sim_pending_all(s);
    CHECK(left[round] < 400);
    end();
  }
  CHECK_EQ(left[0], left[1]);
}

SCENE(sim_run_seeded_runs_an_order_given_by_its_seed)
{
  void *a = stream(), *b = stream();
  for (int i = 0; i < 10; i++) {
    sim_kernel(s, 0, a, NULL, 0, SIM_READ);
    sim_kernel(s, 0, b, NULL, 0, SIM_READ);
  }
  CHECK_EQ(sim_run_seeded(s, 5, 8), 8);
  CHECK_EQ(sim_pending_all(s), 12);
  CHECK_EQ(sim_run_seeded(s, 5, 100), 12);
}

static esper_status wait_for_event(void *e)
{
  return d->event_synchronize(d->self, 0, e);
}

static esper_status wait_a_while(void *e)
{
  return d->event_wait(d->self, 0, e, 100);
}

static esper_status (*const HOST_WAITS[])(void *) = {wait_for_event, wait_a_while};

TEST(a_host_wait_runs_other_streams_that_raise_a_flag)
{
  for (int i = 0; i < 2; i++) {
    begin();
    void *a = stream(), *b = stream(), *e = event();
    sim_wait_flag(s, 0, a, 0);
    CHECK_OK(d->event_record(d->self, 0, e, a));
    sim_raise_flag(s, 0, b, 0);
    CHECK_OK(HOST_WAITS[i](e));
    check_silent();
    end();
  }
}

SCENE(an_impossible_host_wait_is_reported)
{
  void *a = stream(), *b = stream(), *e = event();
  sim_wait_flag(s, 0, a, 0);
  CHECK_OK(d->event_record(d->self, 0, e, a));
  CHECK_OK(d->stream_wait(d->self, 0, b, e));
  CHECK_OK(d->event_record(d->self, 0, e, b));
  COMPLAINS(d->event_synchronize(d->self, 0, e), ESPER_DEVICE_ERROR, "can never run");
  CHECK(strstr(report, "waits for flag 0"));
  CHECK_STATUS(d->device_synchronize(d->self, 0), ESPER_DEVICE_ERROR);
}

/* ---- waiting for a limited time ------------------------------------------- */

SCENE_WITH(a_limited_wait_with_seeds_gives_both_answers,
           begin_with((sim_options){.completion = SIM_SEEDED, .seed = 7}))
{
  int answers[2] = {0};
  void *a = stream(), *e = event();
  for (int i = 0; i < 50; i++) {
    for (int k = 0; k < 20; k++)
      sim_kernel(s, 0, a, NULL, 0, SIM_READ);
    CHECK_OK(d->event_record(d->self, 0, e, a));
    esper_status status = wait_a_while(e);
    CHECK(status == ESPER_OK || status == ESPER_NOT_READY);
    answers[status == ESPER_OK]++;
    while (wait_a_while(e) == ESPER_NOT_READY)
      ;
    CHECK_EQ(sim_pending_all(s), 0);
  }
  CHECK(answers[0] && answers[1]);
  check_silent();
}

SCENE(handles_come_back_and_ids_do_not)
{
  uint64_t id[2];
  void *a = stream();
  CHECK_OK(d->stream_id(d->self, 0, a, &id[0]));
  sim_stream_destroy(s, 0, a);
  COMPLAINS(d->stream_id(d->self, 0, a, &id[1]), ESPER_DEVICE_ERROR, "is no stream");
  CHECK(stream() == a);
  CHECK_OK(d->stream_id(d->self, 0, a, &id[1]));
  CHECK(id[0] != id[1]);
}

static void *thread_id(void *id)
{
  CHECK_OK(d->stream_id(d->self, 0, (void *)2, id));
  return NULL;
}

SCENE_WITH(special_handles_mean_what_they_mean_in_cuda, begin_with((sim_options){.devices = 2}))
{
  uint64_t id[5];
  CHECK_OK(d->stream_id(d->self, 0, NULL, &id[0]));
  CHECK_OK(d->stream_id(d->self, 0, (void *)1, &id[1]));
  CHECK_OK(d->stream_id(d->self, 1, NULL, &id[2]));
  CHECK_EQ(id[0], id[1]);
  CHECK(id[0] != id[2]);
  thread_id(&id[3]);
  thread_id(&id[4]);
  CHECK_EQ(id[3], id[4]);
  CHECK(id[3] != id[0]);
  pthread_t thread;
  pthread_create(&thread, NULL, thread_id, &id[4]);
  pthread_join(thread, NULL);
  CHECK(id[3] != id[4]);
  sim_thread_stream_destroy(s, 0);
  thread_id(&id[4]);
  CHECK(id[3] != id[4]);
}

SCENE_WITH(events_and_streams_belong_to_their_device, begin_with((sim_options){.devices = 2}))
{
  void *a = stream(), *b = sim_stream_create(s, 1), *e = event();
  COMPLAINS(d->event_record(d->self, 1, e, b), ESPER_DEVICE_ERROR, "is no event of device 1");
  COMPLAINS(d->event_record(d->self, 0, e, b), ESPER_DEVICE_ERROR, "is no stream of device 0");
  CHECK_OK(d->event_record(d->self, 0, e, a));
  CHECK_OK(d->stream_wait(d->self, 1, b, e)); /* waits cross devices */
  COMPLAINS(d->event_create(d->self, 2, &e), ESPER_DEVICE_ERROR, "no device 2");
}

SCENE_WITH(one_event_can_stand_for_the_whole_device,
           begin_with((sim_options){WHEN_TOLD, .devices = 2}))
{
  void *a = stream(), *b = stream(), *c = sim_stream_create(s, 1);
  void *e = event();
  sim_kernel(s, 0, a, NULL, 0, SIM_READ);
  sim_kernel(s, 0, b, NULL, 0, SIM_READ);
  sim_kernel(s, 1, c, NULL, 0, SIM_READ);
  CHECK_OK(d->event_record_all(d->self, 0, e));
  sim_kernel(s, 0, b, NULL, 0, SIM_READ);
  CHECK_OK(d->stream_wait(d->self, 1, c, e));
  sim_run_stream(s, 0, a, 9);
  CHECK_STATUS(d->event_query(d->self, 0, e), ESPER_NOT_READY);
  sim_run_stream(s, 1, c, 9);
  CHECK(sim_pending(s, 1, c) > 0);
  sim_run_stream(s, 0, b, 1);
  CHECK_OK(d->event_query(d->self, 0, e));
  sim_run_stream(s, 1, c, 9);
  CHECK_EQ(sim_pending(s, 1, c), 0);
  sim_capture_begin(s, 0, a);
  CHECK_STATUS(d->event_record_all(d->self, 0, e), ESPER_CAPTURING);
  CHECK(!sim_capture_is_valid(s, 0, a));
  sim_capture_abort(s, 0, a);
}

/* ---- memory ------------------------------------------------------------- */

SCENE_WITH(capacity_is_kept, begin_with((sim_options){.capacity = 1 << 20}))
{
  size_t free, total;
  uintptr_t a, b;
  CHECK_OK(d->memory_alloc(d->self, 0, 1 << 19, &a));
  CHECK_STATUS(d->memory_alloc(d->self, 0, (1 << 19) + 512, &b), ESPER_OUT_OF_MEMORY);
  CHECK_OK(d->memory_alloc(d->self, 0, 1 << 19, &b));
  CHECK_OK(d->memory_info(d->self, 0, &free, &total));
  CHECK_EQ(free, 0);
  CHECK_EQ(total, 1 << 20);
  CHECK_OK(d->memory_free(d->self, 0, a));
  CHECK_OK(d->memory_info(d->self, 0, &free, &total));
  CHECK_EQ(free, 1 << 19);
  COMPLAINS(d->memory_free(d->self, 0, a), ESPER_DEVICE_ERROR, "not the start of an allocation");
  CHECK_STATUS(d->memory_free(d->self, 0, b + 512), ESPER_DEVICE_ERROR);
}

static void check_pages(int backed)
{
  enum { PAGE = 2 << 20 };
  begin_with((sim_options){.virtual_memory = 1, .backed = backed, .oracle = SIM_ORACLE_KNOWN});
  size_t granularity;
  uintptr_t range, other;
  uint64_t page, big;
  CHECK_OK(d->page_granularity(d->self, 0, &granularity));
  CHECK_EQ(granularity, PAGE);
  CHECK_OK(d->range_reserve(d->self, 0, 8 * PAGE, &range));
  CHECK_OK(d->range_reserve(d->self, 0, 8 * PAGE, &other));
  CHECK_OK(d->page_create(d->self, 0, PAGE, &page));
  CHECK_OK(d->page_create(d->self, 0, 2 * PAGE, &big));
  CHECK_OK(d->page_map(d->self, 0, range, PAGE, page, NULL, 0));
  CHECK_OK(d->page_map(d->self, 0, range + PAGE, 2 * PAGE, big, NULL, 0));
  CHECK_OK(d->page_map(d->self, 0, other + PAGE, PAGE, page, NULL, 0)); /* an alias */
  CHECK_STATUS(d->page_map(d->self, 0, range + PAGE, PAGE, page, NULL, 0), ESPER_DEVICE_ERROR);
  check_complained("a page is there");
  CHECK_STATUS(d->page_map(d->self, 0, range + 7 * PAGE, 2 * PAGE, big, NULL, 0),
               ESPER_DEVICE_ERROR);
  check_complained("not in one reserved range");
  if (backed) {
    *(volatile int *)(range + 40) = 1234;
    CHECK_EQ(*(volatile int *)(other + PAGE + 40), 1234);
  }
  sim_alive alive;
  sim_count_alive(s, 0, &alive);
  CHECK_EQ(alive.pages, 2);
  CHECK_EQ(alive.mappings, 3);
  CHECK_EQ(alive.ranges, 2);
  CHECK_EQ(alive.bytes, 3 * PAGE);
  COMPLAINS(d->range_free(d->self, 0, range, 8 * PAGE), ESPER_DEVICE_ERROR, "still has pages");
  /* A released page lives as long as it is mapped. */
  CHECK_OK(d->page_release(d->self, 0, page));
  CHECK_OK(d->page_unmap(d->self, 0, range, 3 * PAGE));
  sim_count_alive(s, 0, &alive);
  CHECK_EQ(alive.bytes, 3 * PAGE);
  CHECK_OK(d->page_unmap(d->self, 0, other + PAGE, PAGE));
  CHECK_OK(d->page_release(d->self, 0, big));
  COMPLAINS(d->page_release(d->self, 0, big), ESPER_DEVICE_ERROR, "there is no page");
  COMPLAINS(d->page_unmap(d->self, 0, range, PAGE), ESPER_DEVICE_ERROR, "not made of whole pages");
  CHECK_OK(d->range_free(d->self, 0, range, 8 * PAGE));
  CHECK_OK(d->range_free(d->self, 0, other, 8 * PAGE));
  sim_count_alive(s, 0, &alive);
  CHECK_EQ(alive.bytes + alive.pages + alive.mappings + alive.ranges, 0);
  check_silent();
  end();
}

TEST(pages_are_mapped_anywhere)
{
  check_pages(0);
}
TEST(pages_with_host_memory_are_real_aliases)
{
  check_pages(1);
}

/* ---- captures ----------------------------------------------------------- */

SCENE(events_join_streams_to_a_capture)
{
  void *a = stream(), *b = stream(), *p = memory(4096), *q = memory(4096);
  void *e = sim_event_create(s, 0);
  uint64_t id = sim_capture_begin(s, 0, a), capture;
  sim_owner_begin(s, p, 4096, 0, a);
  kernel(a, p);
  CHECK_OK(sim_event_record(s, 0, e, a));
  CHECK_STATUS(d->event_query(d->self, 0, e), ESPER_CAPTURING);
  CHECK_STATUS(d->event_synchronize(d->self, 0, e), ESPER_CAPTURING);
  CHECK_OK(sim_stream_wait(s, 0, b, e));
  CHECK_OK(d->stream_capture(d->self, 0, b, &capture));
  CHECK_EQ(capture, id);
  /* What a frees before the fork may be reused on b; not the reverse. */
  sim_owner_end(s, p);
  CHECK(sim_is_ordered(s, p, 4096, 0, b));
  sim_owner_begin(s, q, 4096, 0, b);
  kernel(b, q);
  sim_owner_end(s, q);
  CHECK(sim_is_ordered(s, q, 4096, 0, b));
  CHECK(!sim_is_ordered(s, q, 4096, 0, a));
  CHECK_OK(sim_event_record(s, 0, e, b));
  CHECK_OK(sim_stream_wait(s, 0, a, e));
  CHECK(sim_is_ordered(s, q, 4096, 0, a));
  /* A third stream outside knows nothing of all this. */
  CHECK(!sim_is_ordered(s, q, 4096, 0, stream()));
  CHECK(sim_capture_is_valid(s, 0, a));
  sim_graph *graph = sim_capture_end(s, 0, a);
  CHECK(graph);
  CHECK_OK(d->stream_capture(d->self, 0, b, &capture));
  CHECK_EQ(capture, 0);
  sim_graph_destroy(s, graph);
  check_silent();
}

SCENE(an_unjoined_stream_spoils_the_capture)
{
  void *a = stream(), *b = stream();
  sim_capture_begin(s, 0, a);
  sim_kernel(s, 0, a, NULL, 0, SIM_READ);
  sim_stream_wait_stream(s, 0, b, 0, a);
  sim_kernel(s, 0, b, NULL, 0, SIM_READ);
  CHECK(!sim_capture_end(s, 0, a));
}

SCENE(waits_across_the_border_of_a_capture_invalidate_it)
{
  void *a = stream(), *b = stream(), *e = event(), *f = sim_event_create(s, 0);
  CHECK_OK(d->event_record(d->self, 0, e, b));
  /* An outside event inside. */
  uint64_t capture;
  sim_capture_begin(s, 0, a);
  CHECK_STATUS(d->stream_wait(d->self, 0, a, e), ESPER_CAPTURING);
  CHECK(!sim_capture_is_valid(s, 0, a));
  CHECK_OK(d->stream_capture(d->self, 0, a, &capture));
  CHECK(capture == ESPER_CAPTURE_INVALID); /* invalid, but not ended */
  CHECK(!sim_capture_end(s, 0, a));
  /* The core waits for a captured event outside. */
  sim_capture_begin(s, 0, a);
  CHECK_OK(sim_event_record(s, 0, f, a));
  CHECK_STATUS(d->stream_wait(d->self, 0, b, f), ESPER_CAPTURING);
  CHECK_OK(d->stream_capture(d->self, 0, b, &capture));
  CHECK_EQ(capture, 0);
  CHECK(!sim_capture_is_valid(s, 0, a));
  sim_capture_abort(s, 0, a);
  /* Two captures. */
  sim_capture_begin(s, 0, a);
  CHECK_OK(sim_event_record(s, 0, f, a));
  sim_capture_begin(s, 0, b);
  CHECK_STATUS(sim_stream_wait(s, 0, b, f), ESPER_CAPTURING);
  CHECK(!sim_capture_is_valid(s, 0, a));
  CHECK(!sim_capture_is_valid(s, 0, b));
}

SCENE(recording_an_event_of_the_core_in_a_capture_is_reported)
{
  void *a = stream(), *e = event();
  sim_capture_begin(s, 0, a);
  COMPLAINS(d->event_record(d->self, 0, e, a), ESPER_CAPTURING, "which is being captured");
  CHECK_OK(d->event_query(d->self, 0, e)); /* nothing happened */
}

SCENE(a_replay_may_not_touch_what_belongs_to_others)
{
  void *a = stream(), *b = stream(), *p = memory(4096);
  sim_capture_begin(s, 0, a);
  sim_owner_begin(s, p, 4096, 0, a);
  kernel(a, p);
  sim_graph *graph = sim_capture_end(s, 0, a);
  sim_graph_launch(s, graph, 0, a);
  sim_owner_end(s, p);
  sim_graph_launch(s, graph, 0, a); /* nobody's */
  CHECK_OK(sim_device_synchronize(s, 0));
  check_silent();
  sim_owner_begin(s, p, 4096, 0, b);
  check_silent();
  sim_graph_launch(s, graph, 0, a);
  check_complained("which now belongs to");
  sim_graph_destroy(s, graph);
}

/* ---- the oracle: what it must refuse ------------------------------------ */

/* p was used on `a` by an owner that is gone. */
static void *used_memory(void *a)
{
  void *p = memory(4096);
  sim_owner_begin(s, p, 4096, 0, a);
  kernel(a, p);
  sim_owner_end(s, p);
  return p;
}

static void check_refused(void *p, void *st)
{
  CHECK(!sim_is_ordered(s, p, 4096, 0, st));
  sim_owner_begin(s, p, 4096, 0, st);
  check_complained("is not ordered before");
}

static void check_accepted(void *p, void *st)
{
  CHECK(sim_is_ordered(s, p, 4096, 0, st));
  sim_owner_begin(s, p, 4096, 0, st);
  check_silent();
}

SCENE(unordered_reuse_is_caught_though_it_has_run)
{
  void *a = stream(), *b = stream(), *p = used_memory(a);
  sim_run_all(s); /* nobody knows */
  check_refused(p, b);
}

SCENE_WITH(the_lax_oracle_believes_what_has_run,
           begin_with((sim_options){.oracle = SIM_ORACLE_EXECUTED, .completion = SIM_WHEN_TOLD}))
{
  void *a = stream(), *b = stream(), *p = used_memory(a);
  check_refused(p, b);
  sim_run_all(s);
  check_accepted(p, b);
}

/* A page is open to its device, to the peers that it was mapped for, and to whom
 * it was opened since; classic memory to everybody. */
SCENE_WITH(a_page_is_open_to_whom_it_was_given,
           begin_with((sim_options){WHEN_TOLD, .devices = 3, .virtual_memory = 1}))
{
  enum { PAGE = 2 << 20 };
  uintptr_t range;
  uint64_t page;
  int peer = 1;
  CHECK_OK(d->range_reserve(d->self, 0, PAGE, &range));
  CHECK_OK(d->page_create(d->self, 0, PAGE, &page));
  CHECK_OK(d->page_map(d->self, 0, range, PAGE, page, &peer, 1));
  void *p = (void *)range, *st[3];
  for (int i = 0; i < 3; i++)
    st[i] = sim_stream_create(s, i);
  sim_owner_begin(s, p, PAGE, 0, st[0]);
  for (int i = 0; i < 2; i++)
    sim_kernel(s, i, st[i], p, PAGE, SIM_READ);
  check_silent();
  sim_kernel(s, 2, st[2], (char *)p + PAGE - 512, 512, SIM_READ);
  check_complained("a kernel of device 2");
  CHECK_EQ(sim_pending_all(s), 2);
  CHECK_OK(d->page_access(d->self, 0, range, PAGE, 2));
  sim_kernel(s, 2, st[2], p, PAGE, SIM_READ);
  check_silent();
  CHECK(sim_may_access(s, 2, p, PAGE));
  CHECK_STATUS(d->page_access(d->self, 0, range, PAGE, 3), ESPER_DEVICE_ERROR);
  check_complained("page_access of device 3");
  CHECK_STATUS(d->page_access(d->self, 1, range, PAGE, 2), ESPER_DEVICE_ERROR);
  check_complained("whole pages of device 1");
  CHECK(sim_may_access(s, 2, memory(PAGE), PAGE));
  CHECK_OK(d->peer_check(d->self, 0, 2));
  sim_set_reach(s, 0);
  CHECK_STATUS(d->peer_check(d->self, 0, 2), ESPER_UNSUPPORTED);
}

SCENE(a_wait_enqueued_too_late_does_not_help_the_event)
{
  void *a = stream(), *b = stream(), *c = stream(), *e = event(), *f = event();
  void *p = used_memory(a);
  CHECK_OK(d->event_record(d->self, 0, e, a));
  CHECK_OK(d->event_record(d->self, 0, f, b));
  CHECK_OK(d->stream_wait(d->self, 0, b, e)); /* after f */
  CHECK_OK(d->stream_wait(d->self, 0, c, f));
  check_refused(p, c);
}

SCENE(a_fresh_event_orders_nothing)
{
  void *a = stream(), *b = stream(), *p = used_memory(a), *e = event();
  CHECK_OK(d->event_query(d->self, 0, e));
  CHECK_OK(d->event_synchronize(d->self, 0, e));
  CHECK_OK(d->stream_wait(d->self, 0, b, e));
  check_refused(p, b);
}

SCENE_WITH(another_device_synchronised_orders_nothing,
           begin_with((sim_options){WHEN_TOLD, .devices = 2}))
{
  void *a = stream(), *b = stream(), *p = used_memory(a);
  CHECK_OK(d->device_synchronize(d->self, 1));
  check_refused(p, b);
}

SCENE(eager_work_and_a_capture_are_unordered)
{
  void *a = stream(), *b = stream(), *p = used_memory(a);
  sim_capture_begin(s, 0, a);
  check_refused(p, a); /* even on the same stream */
  sim_capture_abort(s, 0, a);
  check_accepted(p, a);
  /* And the reverse. */
  void *q = memory(4096);
  sim_capture_begin(s, 0, b);
  sim_owner_begin(s, q, 4096, 0, b);
  kernel(b, q);
  sim_owner_end(s, q);
  check_refused(q, a);
  check_accepted(q, b);
}

SCENE(live_memory_is_not_handed_out)
{
  void *a = stream();
  char *p = memory(8192);
  sim_owner_begin(s, p, 4096, 0, a);
  sim_owner_begin(s, p + 2048, 4096, 0, a);
  check_complained("handed out while it is live");
  sim_owner_begin(s, p + 4096, 4096, 0, a);
  check_silent();
}

SCENE(accesses_need_a_live_owner)
{
  void *a = stream();
  char *p = memory(8192);
  kernel(a, p);
  check_complained("not within one live allocation");
  sim_owner_begin(s, p, 4096, 0, a);
  sim_owner_begin(s, p + 4096, 4096, 0, a);
  sim_kernel(s, 0, a, p, 4097, SIM_READ);
  check_complained("not within one live allocation");
  sim_owner_end(s, p);
  kernel(a, p);
  check_complained("is freed");
  sim_owner_end(s, p);
  check_complained("no live allocation begins");
  sim_kernel(s, 0, a, (char *)memory(512) + 512, 512, SIM_READ);
  check_complained("there is no memory at");
}

SCENE(memory_in_use_is_not_given_back)
{
  void *a = stream(), *p = memory(4096);
  uintptr_t address = (uintptr_t)p;
  sim_owner_begin(s, p, 4096, 0, a);
  COMPLAINS(d->memory_free(d->self, 0, address), ESPER_DEVICE_ERROR, "that is live");
  kernel(a, p);
  sim_owner_end(s, p);
  COMPLAINS(d->memory_free(d->self, 0, address), ESPER_DEVICE_ERROR, "still accessed");
  sim_run_all(s);
  COMPLAINS(d->memory_free(d->self, 0, address), ESPER_DEVICE_ERROR,
            "still accessed"); /* nobody knows that it has run */
  CHECK_OK(d->device_synchronize(d->self, 0));
  CHECK_OK(d->memory_free(d->self, 0, address));
  check_silent();
}

SCENE_WITH(pages_in_use_are_not_unmapped_and_aliases_are_one_memory,
           begin_with((sim_options){WHEN_TOLD, .virtual_memory = 1}))
{
  enum { PAGE = 2 << 20 };
  void *a = stream(), *b = stream();
  uintptr_t range, alias;
  uint64_t page[2];
  CHECK_OK(d->range_reserve(d->self, 0, 2 * PAGE, &range));
  CHECK_OK(d->range_reserve(d->self, 0, PAGE, &alias));
  for (int i = 0; i < 2; i++) {
    CHECK_OK(d->page_create(d->self, 0, PAGE, &page[i]));
    CHECK_OK(d->page_map(d->self, 0, range + (uintptr_t)i * PAGE, PAGE, page[i], NULL, 0));
  }
  CHECK_OK(d->page_map(d->self, 0, alias, PAGE, page[1], NULL, 0));
  /* A block over both pages. */
  void *p = (void *)(range + PAGE / 2);
  sim_owner_begin(s, p, PAGE, 0, a);
  sim_kernel(s, 0, a, p, PAGE, SIM_WRITE);
  check_silent();
  sim_owner_begin(s, (void *)alias, 4096, 0, b); /* its other address */
  check_complained("while it is live");
  sim_owner_end(s, p);
  check_silent();
  sim_owner_begin(s, (void *)alias, 4096, 0, b);
  check_complained("is not ordered before");
  sim_owner_begin(s, (void *)alias, 4096, 0, a);
  check_silent();
  COMPLAINS(d->page_unmap(d->self, 0, range, PAGE), ESPER_DEVICE_ERROR, "still accessed");
  CHECK_OK(d->device_synchronize(d->self, 0));
  /* Live at its other address, the page may leave this one. */
  CHECK_OK(d->page_unmap(d->self, 0, range, 2 * PAGE));
  check_silent();
  COMPLAINS(d->page_unmap(d->self, 0, alias, PAGE), ESPER_DEVICE_ERROR, "that is live");
}

/* ---- the oracle: followers -------------------------------------------------- */

/* By role: r receives memory that s still reads, and t may follow r. */
static void *r_, *s_, *t_;
static const sim_options FOLLOWERS = {WHEN_TOLD, .devices = 2};

static void begin_followers(void)
{
  begin_with(FOLLOWERS);
  r_ = stream();
  s_ = stream();
  t_ = stream();
}

static void give(void *st)
{
  sim_kernel(s, 0, st, NULL, 0, SIM_READ);
}

static void wait_for(void *st, void *other)
{
  sim_stream_wait_stream(s, 0, st, 0, other);
}

/* The core makes a stream wait. */
static void wait_of_the_core(void *st, void *other)
{
  void *e = event();
  CHECK_OK(d->event_record(d->self, 0, e, other));
  CHECK_OK(d->stream_wait(d->self, 0, st, e));
  CHECK_OK(d->event_destroy(d->self, 0, e));
}

/* ... by a name that the report must give. */
static void check_refused_for(void *p, const char *follower)
{
  CHECK(!sim_is_ordered(s, p, 4096, 0, r_));
  sim_owner_begin(s, p, 4096, 0, r_);
  check_complained(follower);
  check_contains("is not ordered before that stream's future");
}

static const char *name(int device, void *st)
{
  static char text[64];
  snprintf(text, sizeof text, "used at once on stream %llu (device %d",
           (unsigned long long)sim_stream_id(s, device, st), device);
  return text;
}

SCENE_WITH(a_follower_does_not_come_after_the_cores_wait, begin_followers())
{
  void *p = used_memory(s_);
  give(r_);
  wait_for(t_, r_);
  wait_of_the_core(r_, s_);
  check_refused_for(p, name(0, t_));
  char words[128];
  snprintf(words, sizeof words, "was handed out on stream %llu (",
           (unsigned long long)sim_stream_id(s, 0, r_));
  check_contains(words);
  snprintf(words, sizeof words, "operation 1 of stream %llu (",
           (unsigned long long)sim_stream_id(s, 0, s_));
  check_contains(words);
  wait_for(t_, r_); /* comes after the wait as well */
  check_accepted(p, r_);
}

SCENE_WITH(followers_of_followers_follow, begin_followers())
{
  void *p = used_memory(s_), *u = stream();
  give(r_);
  wait_for(t_, r_);
  wait_for(u, t_);
  wait_of_the_core(r_, s_);
  wait_of_the_core(t_, s_);
  check_refused_for(p, name(0, u));
  sim_stream_destroy(s, 0, u);
  check_accepted(p, r_);
}

SCENE_WITH(everybody_follows_a_stream_without_work, begin_followers())
{
  void *p = used_memory(s_);
  wait_of_the_core(r_, s_);
  check_refused_for(p, "used at once on stream");
  end();
  begin_with(FOLLOWERS);
  r_ = stream();
  p = used_memory(NULL);
  void *other = used_memory(NULL);
  sim_stream_wait_stream(s, 1, NULL, 0, NULL); /* all that there are but r */
  wait_of_the_core(r_, NULL);
  check_refused_for(p, "a stream that is yet to be made");
  sim_stream_destroy(s, 0, r_); /* nor has the next one with its handle got any */
  void *again = stream();
  CHECK(again == r_);
  wait_of_the_core(r_, NULL);
  check_refused_for(other, "a stream that is yet to be made");
}

SCENE_WITH(who_waits_for_an_event_follows, begin_followers())
{
  void *p = used_memory(s_), *e = sim_event_create(s, 0), *f = event();
  give(r_);
  CHECK_OK(sim_event_record(s, 0, e, r_));
  CHECK_OK(d->event_record(d->self, 0, f, r_)); /* the program does not have this one */
  wait_of_the_core(r_, s_);
  check_refused_for(p, "a stream that waits for an event of device 0");
  CHECK_OK(sim_event_record(s, 0, e, r_));
  CHECK(sim_is_ordered(s, p, 4096, 0, r_)); /* now it stands for that wait, too */
  sim_event_destroy(s, 0, e);
  check_accepted(p, r_);
}

enum { BY_KERNEL, BY_FLAG, BY_RAISING, BY_WAIT, BY_GRAPH, BY_COPY, BY_NOTHING };

static void give_by(int kind)
{
  void *host;
  sim_graph *graph;
  switch (kind) {
  case BY_KERNEL: give(r_); break;
  case BY_FLAG: sim_wait_flag(s, 0, r_, 0); break;
  case BY_RAISING: sim_raise_flag(s, 0, r_, 0); break;
  case BY_WAIT: wait_for(r_, stream()); break;
  case BY_GRAPH:
    sim_capture_begin(s, 0, t_);
    give(t_);
    graph = sim_capture_end(s, 0, t_);
    sim_graph_launch(s, graph, 0, r_);
    sim_graph_destroy(s, graph);
    break;
  case BY_COPY:
    CHECK_OK(d->host_alloc(d->self, 0, 4096, &host));
    CHECK_OK(d->copy_to_host(d->self, 0, r_, host, (uintptr_t)memory(4096), 4096));
    break;
  default: wait_of_the_core(s_, r_); /* records an event */
  }
}

TEST(what_the_program_gives_counts_and_what_the_core_enqueues_does_not)
{
  for (int kind = BY_KERNEL; kind <= BY_NOTHING; kind++) {
    begin_followers();
    void *p = used_memory(s_);
    give(r_);
    wait_for(t_, r_);
    wait_of_the_core(r_, s_);
    give_by(kind);
    if (kind == BY_NOTHING)
      check_refused_for(p, name(0, t_));
    else
      check_accepted(p, r_);
    end();
  }
}

/* ---- patterns ------------------------------------------------------------ */

SCENE_WITH(kernels_check_real_memory_when_they_run,
           begin_with((sim_options){.backed = 1,
                                    .oracle = SIM_ORACLE_EXECUTED,
                                    .completion = SIM_WHEN_TOLD}))
{
  void *a = stream(), *b = stream(), *p = used_memory(a);
  sim_run_all(s);
  check_accepted(p, b);
  kernel(b, p);
  sim_run_all(s);
  CHECK(*(uint64_t *)p == 2);
  check_silent();
  /* Somebody later was there before the first owner's access had run. */
  *(uint64_t *)((char *)p + 512) = 1000;
  sim_kernel(s, 0, b, p, 4096, SIM_READ);
  sim_run_all(s);
  check_complained("was overwritten");
}
