/* Rule 7: captures. */
#include "episode.h"

/* A mark, and the free of memory that was marked, while the reader is captured. */
TEST(rule_7a_on_a_capturing_stream_no_event_is_recorded)
{
  begin(4 * X);
  block x = take_written(X, R), y = take_written(X, R);
  machine_sync(handle(R));
  mark_until_free(&y, S);
  capture_begin(S);
  check_on(&x, S, 0);
  mark(&x, S, 0);
  void *read = give(&x), *held = give(&y);
  esper_retire(p.core, 0);
  x = take_written(X, R);
  y = take_written(X, R);
  CHECK_SIM(x.at != read && x.at != held && y.at != read && y.at != held);
  CHECK_EQ(counters_now().captured_uses, 1);
  capture_end(S);
  END(&x, &y);
}

/* R captures a graph that reads x, which is O's. The graph runs on T, which O does not wait for. */
TEST(rule_7a_memory_that_a_graph_reads_from_outside_is_held)
{
  for (marked how = 0; how < BY_EVENT; how++) {
    begin(64 * MIB);
    block x = take_written(X, O);
    machine_wait(handle(R), handle(O));
    machine_wait(handle(T), handle(O));
    capture_begin(R);
    machine_delay(handle(R), LATE);
    check_on(&x, R, 0);
    mark_by(how, &x, R);
    machine_launch(capture_end(R), handle(T));
    give(&x);
    x = take_written(X, O);
    END(&x);
  }
}

/* The graph writes its memory whenever it runs. */
TEST(rule_7b_queue_order_counts_within_one_capture_only)
{
  begin(64 * MIB);
  block x = take_written(X, R);
  void *outside = give(&x);
  capture_begin(R);
  x = take_written(X, R);
  CHECK_SIM(x.at != outside);
  void *inside = give(&x);
  x = take_written(X, R);
  CHECK(x.at == inside); /* inside, the queue orders */
  give(&x);
  void *graph = capture_end(R);
  x = take_written(X, R);
  CHECK(x.at != inside);
  CHECK_SIM(x.at == outside); /* and outside */
  machine_launch(graph, handle(R));
  END(&x);
}

TEST(rule_7b_inside_a_capture_work_outside_is_not_waited_for)
{
  begin(X);
  block x = take_written(X, R);
  machine_wait(handle(S), handle(R));
  machine_stall(handle(S));
  check_on(&x, S, 0);
  mark(&x, S, 0);
  void *at = give(&x);
  capture_begin(R);
  limit_waits(0);
  x = take(X, R);
  limit_waits(-1);
  CHECK(!x.at); /* short of memory, too */
  capture_end(R);
  machine_let_go(handle(O));
  x = take_written(X, R);
  CHECK(x.at == at);
  END(&x);
}

/* R still writes what was freed to the pool before. The graph runs on S, which is not behind R. */
TEST(rule_7c_a_capture_gets_from_its_pool_what_has_completed)
{
  begin(64 * MIB);
  pool_open();
  block x = take(X, R);
  write_late(&x);
  void *at = give(&x);
  pool_close();
  pool_open();
  capture_begin(R);
  x = take_written(X, R);
  CHECK(x.at == at); /* the host has waited for R */
  capture_launch(S);
  pool_close();
  pool_release(2);
  END(&x);
}

/* R still writes what is freed to the pool while it is captured. */
TEST(rule_7d_memory_from_outside_the_capture_waits_for_the_next_quiesce)
{
  begin(64 * MIB);
  pool_open();
  block x = take(X, R), y = take(Y, R);
  void *quiesced = give(&y);
  pool_close();
  pool_open();
  write_late(&x);
  capture_begin(R);
  y = take_written(Y, R); /* the memory is the capture's from here */
  CHECK(y.at == quiesced);
  void *at = give(&x);
  x = take_written(X, R);
  CHECK(x.at != at);
  capture_launch(S);
  pool_close();
  pool_open();
  capture_begin(R);
  block z = take_written(X, R);
  CHECK(z.at == at); /* now it has been waited for */
  capture_launch(S);
  pool_close();
  pool_release(3);
  END(&x, &y, &z);
}

TEST(rule_7e_memory_of_a_graph_is_not_given_back)
{
  begin(64 * MIB);
  pool_open();
  capture_begin(R);
  block x = take_written(X, R);
  give(&x);
  void *graph = capture_end(R);
  pool_close();
  machine_launch(graph, handle(S));
  CHECK_OK(esper_empty_cache(p.core, 0, NULL));
  CHECK(reserved_now() >= X);
  machine_launch(graph, handle(S));
  pool_release(1);
  END();
}

/* The graph is replayed on R. T allocates from the pool outside captures, in no order with R. */
TEST(rule_7e_memory_of_a_graph_is_lent_to_no_other_stream)
{
  begin(64 * MIB);
  pool_open();
  capture_begin(R);
  block x = take_written(X, R);
  give(&x);
  void *graph = capture_end(R);
  pool_close();
  pool_open();
  x = take_written(X, T);
  machine_launch(graph, handle(R));
  pool_close();
  pool_release(2);
  END(&x);
}

TEST(rule_7f_a_mark_works_while_another_stream_is_captured)
{
  begin(X + 2 * MIB);
  block x = take_written(X, R), known = take(512, O);
  give(&known); /* the core has met O */
  capture_begin(O);
  read_and_mark(&x, S, LATE);
  void *at = give(&x);
  x = take_written(X, R);
  CHECK(x.at == at);
  capture_end(O);
  END(&x);
}

TEST(rule_7f_a_mark_outlives_a_capture_that_begins_later)
{
  begin(X);
  block x = take_written(X, R);
  read_and_mark(&x, S, LATE);
  capture_begin(S);
  void *at = give(&x);
  x = take_written(X, R);
  CHECK(x.at == at);
  capture_end(S);
  END(&x);
}

/* In the graph S reads x late, and T, a branch since before the malloc, is the first to write. */
static void captured_use(marked how, int with_pool)
{
  begin(256 * MIB);
  if (with_pool)
    pool_open();
  capture_begin(R);
  block x = take_written(X, R);
  read_on(&x, S, LATE);
  mark_by(how, &x, S);
  void *at = give(&x);
  block y = first_on_T(X);
  CHECK(y.at != at);
  machine_wait(handle(R), handle(S)); /* now the program's own edges say that S is done */
  x = first_on_T(X);
  CHECK(x.at == at);
  machine_wait(handle(R), handle(T));
  void *graph = capture_end(R);
  CHECK_EQ(machine_nodes(graph), 5);
  machine_launch(graph, handle(R));
  if (with_pool)
    pool_close(), pool_release(1);
  END(&x, &y);
}

TEST(rule_7g_inside_a_capture_a_use_holds_until_its_point_comes_before)
{
  for (marked how = 0; how < BY_EVENT; how++)
    for (int with_pool = 0; with_pool < 2; with_pool++)
      captured_use(how, with_pool);
}

TEST(rule_7g_inside_a_capture_the_streams_own_memory_serves_again)
{
  begin(64 * MIB);
  pool_open();
  capture_begin(R);
  block x = take_written(X, R);
  void *at = give(&x);
  x = first_on_T(X);
  CHECK(x.at == at);
  machine_wait(handle(R), handle(T));
  void *graph = capture_end(R);
  CHECK_EQ(machine_nodes(graph), 2);
  machine_launch(graph, handle(R));
  pool_close();
  pool_release(1);
  END(&x);
}

/* O, which is not captured, reads late what the capture was given. */
TEST(rule_7h_nothing_in_a_capture_satisfies_what_is_owed_outside)
{
  begin(64 * MIB);
  capture_begin(R);
  block x = take_for(X, R, O);
  void *at = x.at;
  write_block(&x);
  machine_delay(handle(O), LATE);
  check_on(&x, O, 0);
  mark(&x, O, 0);
  give(&x);
  x = take_written(X, R);
  CHECK(x.at != at);
  capture_launch(R);
  END(&x);
}

/* The graph that R captured reads R's x, and runs on T. */
TEST(rule_7j_a_graph_may_read_on_any_stream)
{
  begin(64 * MIB);
  block x = take_written(X, R);
  pool_open();
  capture_begin(R);
  machine_delay(handle(R), LATE);
  check_on(&x, R, 0);
  note(&x, R);
  void *graph = capture_end(R);
  pool_close();
  machine_wait(handle(T), handle(R));
  machine_launch(graph, handle(T));
  give(&x);
  x = take_written(X, R);
  pool_release(1);
  END(&x);
}

#ifdef MACHINE_SIM
/* ---- captures that begin meanwhile, bodies of conditional nodes -------------- */

/* As in CUDA, an event may be recorded inside a capture, and a stream that waits for it joins. */
static bool captured_meanwhile;

static esper_status capture_and_record(void *self, int device, void *event, void *stream)
{
  (void)self;
  if (!captured_meanwhile && stream == handle(S)) {
    captured_meanwhile = true; /* by another thread, since the core asked */
    capture_begin(S);
  }
  return sim_event_record(machine_sim(), device, event, stream);
}

static esper_status wait_and_join(void *self, int device, void *stream, void *event)
{
  (void)self;
  return sim_stream_wait(machine_sim(), device, stream, event);
}

static void mark_one_of_two(const block *x)
{
  const void *both[] = {NULL, x->at};
  CHECK_OK(esper_record_use(p.core, both, 2, p.streams[S], 0, NULL));
}

TEST(rule_7a_nobody_joins_a_capture_that_begins_while_an_event_is_recorded)
{
  for (int how = 0; how < 3; how++) {
    begin(X);
    program_driver()->event_record = capture_and_record;
    program_driver()->stream_wait = wait_and_join;
    captured_meanwhile = false;
    block x = take_written(X, R);
    read_on(&x, S, 0);
    if (how == 0)
      mark_until_free(&x, S);
    else if (how == 1)
      mark(&x, S, 0);
    else
      mark_one_of_two(&x);
    void *at = give(&x);
    x = take(X, R);
    CHECK(!x.at && captured_meanwhile);
    uint64_t capture;
    CHECK_OK(program_driver()->stream_capture(program_driver()->self, 0, handle(R), &capture));
    CHECK_EQ(capture, 0);
    capture_end(S);
    x = take_written(X, R);
    CHECK(x.at == at); /* an event of after the capture does */
    END(&x);
  }
}

/* The driver is asked before and after; a capture may come and go in between. */
static esper_status record_inside(void *self, int device, void *event, void *stream)
{
  (void)self;
  bool inside = !captured_meanwhile && stream == handle(S);
  if (inside) {
    captured_meanwhile = true;
    capture_begin(S);
  }
  esper_status status = sim_event_record(machine_sim(), device, event, stream);
  if (inside)
    capture_end(S);
  return status;
}

TEST(rule_7a_an_event_of_a_capture_that_came_and_went_holds_nothing_up_for_long)
{
  begin(64 * MIB);
  program_driver()->event_record = record_inside;
  captured_meanwhile = false;
  block small = take(512, R), x = take_written(X, R);
  mark_until_free(&small, S);
  give(&small); /* the event at its free is inside the capture */
  CHECK(captured_meanwhile);
  for (int i = 0; i < 3; i++) {
    read_and_mark(&x, S, 0);
    give(&x);
    CHECK(counters_now().bytes_pending >= X);
    sim_run_all(machine_sim());
    CHECK_EQ(counters_now().bytes_pending, 0);
    x = take_written(X, R);
  }
  END(&x);
}

/* Where no event stands for all streams, the host waits for one after the other, and then for the
 * whole device, which a capture would not survive. */
static void begin_capture_at_second(void *context, sim_call call, int device, void *object)
{
  (void)call, (void)device, (void)object;
  if (++*(int *)context == 2)
    capture_begin(S);
}

TEST(rule_7a_a_capture_that_begins_while_the_host_waits_goes_on)
{
  int waits = 0;
  begin(64 * MIB);
  sim *s = machine_sim();
  block x = take(512, mortal_stream()); /* has nothing else to be waited for */
  give(&x);
  x = take_written(X, R);
  block y = take_written(X, S);
  give(&x);
  give(&y);
  sim_fail_calls_from(s, SIM_CALL_event_record_all, 1, ESPER_UNSUPPORTED);
  sim_before_call(s, SIM_CALL_event_wait, begin_capture_at_second, &waits);
  CHECK_OK(esper_empty_cache(p.core, 0, NULL)); /* in another thread than the capture's */
  CHECK(waits >= 2);
  CHECK_EQ(sim_calls(s, SIM_CALL_device_synchronize), 0);
  sim_before_call(s, SIM_CALL_event_wait, NULL, NULL);
  sim_fail_call(s, SIM_CALL_event_record_all, 0, ESPER_OK);
  capture_end(S);
  END();
}

/* The body reads y and is a node that T does not come after. */
TEST(rule_7i_a_block_that_is_freed_while_another_graph_is_captured_waits)
{
  begin(128 * MIB);
  sim *s = machine_sim();
  capture_begin(R);
  block y = take_written(Y, R);
  machine_wait(handle(T), handle(R));
  sim_capture_body(s, 0, handle(R), handle(S));
  take_written(X, S);
  check_on(&y, S, 0);
  void *at = give(&y);
  y = take_written(Y, R);
  CHECK(y.at != at); /* the body is not over */
  machine_delay(handle(S), 0);
  CHECK(!sim_capture_end(s, 0, handle(S)));
  machine_wait(handle(R), handle(T));
  capture_end(R);
  END();
}
#endif
