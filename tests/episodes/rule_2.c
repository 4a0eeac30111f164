/* Rule 2: no stream waits. Memory goes out on a stream only if everything that it owes has
 * completed, or lies on that stream, or, inside a capture, precedes the stream's next node by the
 * program's own edges. So streams that come after all the work that the program gave that stream
 * may use the memory at once. program.c finds a core that makes a stream of the program's wait in
 * every other episode, too. */
#include "episode.h"

/* S still reads memory that R gets again, and T, which comes after R, writes there at once. */
TEST(rule_2_a_use_completes_before_its_memory_goes_out)
{
  for (marked how = 0; how < MARKS; how++) {
    begin(X);
    block x = take_written(X, R);
    read_on(&x, S, LATE);
    mark_by(how, &x, S);
    void *at = give(&x);
    x = first_on_T(X);
    CHECK(x.at == at); /* the host has waited for S */
    END(&x);
  }
}

/* S waits for work that R gets after its next malloc. No stream waits for S; the host gives up. */
TEST(rule_2_work_that_waits_for_later_work_holds_nothing_up)
{
  for (marked how = 0; how < MARKS; how++) {
    begin(64 * MIB);
    block x = take_written(X, R);
    machine_wait(handle(S), handle(R));
    machine_stall(handle(S));
    check_on(&x, S, 0);
    mark_by(how, &x, S);
    void *at = give(&x);
    x = first_on_T(X);
    CHECK(x.at != at);
    machine_let_go(handle(R));
    END(&x);
  }
}

/* S, which owned the memory, waits for what R does next. */
TEST(rule_2_an_owner_that_waits_for_later_work_holds_nothing_up)
{
  begin(64 * MIB);
  block x = take(X, S);
  machine_stall(handle(S));
  write_block(&x);
  give(&x);
  x = take_written(X, R);
  machine_let_go(handle(R));
  END(&x);
}

TEST(rule_2_work_on_the_stream_itself_needs_no_wait)
{
  begin(X);
  block x = take_written(X, R);
  write_late(&x);
  mark(&x, R, 0);
  void *at = give(&x);
  x = first_on_T(X);
  CHECK(x.at == at);
  CHECK_SIM(machine_is_busy(handle(R))); /* nor the host's */
  END(&x);
}

/* That R comes after S by the program's order says nothing of what the core knows. */
TEST(rule_2_where_the_program_made_the_stream_wait_the_core_does_not)
{
  begin(X);
  block x = take_written(X, R);
  read_and_mark(&x, S, LATE);
  give(&x);
  machine_wait(handle(R), handle(S));
  x = first_on_T(X);
  END(&x);
}

/* Each is read by another stream, so they stay apart when they are freed. */
TEST(rule_2_all_of_a_run_of_neighbours_completes_before_it_goes_out)
{
  for (marked how = 0; how < MARKS; how++) {
    begin(20 * MIB);
    block run[3];
    for (int i = 0; i < 3; i++) {
      run[i] = take_written((i < 2 ? 6 : 8) * MIB, R);
      read_on(&run[i], i % 2 ? O : S, LATE);
      mark_by(how, &run[i], i % 2 ? O : S);
    }
    void *at = give(&run[0]);
    give(&run[1]);
    give(&run[2]);
    block x = first_on_T(16 * MIB);
    CHECK(x.at == at);
    END(&x);
  }
}

TEST(rule_2_many_other_streams_have_completed_when_their_memory_goes_out)
{
  begin(X + Y + 8 * MIB);
  block x = take_written(X, S), y = take_written(Y, O);
  give(&x);
  give(&y);
  x = first_on_T(X + Y + 4 * MIB); /* goes back to the device first */
  END(&x);
}

/* Three blocks serve for many. */
TEST(rule_2_the_host_is_held_back_and_no_stream_is)
{
  begin_held_back();
  for (int i = 0; i < 8; i++) {
    block x = take_written(X, R);
    read_and_mark(&x, S, LATE / 5);
    give(&x);
  }
  CHECK(reserved_now() <= 3 * X || counters_now().held_back_in_vain);
  END();
}

TEST(rule_2_a_ready_block_is_taken_before_a_pending_one)
{
  begin(64 * MIB);
  block x = take_written(X, R), y = take_written(Y, R);
  read_and_mark(&x, S, LATE);
  give(&x); /* fits best, but S still reads it */
  void *at = give(&y);
  x = take_written(X, R);
  CHECK_SIM(x.at == at);
  END(&x);
}

/* ---- inside captures nothing is added to the graph -------------------------- */

/* S has two tails, and the graph gets no node for the mark. */
TEST(rule_2_no_node_is_added_for_a_mark)
{
  begin(256 * MIB);
  pool_open();
  capture_begin(R);
  block x = take_written(X, R);
  machine_wait(handle(S), handle(R));
  read_on(&x, O, 0);
  check_on(&x, S, 0);
  machine_wait(handle(S), handle(O));
  mark(&x, S, 0);
  void *at = give(&x);
  x = first_on_T(X);
  CHECK(x.at != at);
  machine_wait(handle(R), handle(S));
  machine_wait(handle(R), handle(T));
  void *graph = capture_end(R);
  CHECK_EQ(machine_nodes(graph), 4);
  machine_launch(graph, handle(R));
  pool_close();
  pool_release(1);
  END(&x);
}

/* R comes after all of S, which has two tails, when x is freed and its use ends. A node that S got
 * now would not be joined, and the capture would fail. */
TEST(rule_2_no_node_is_added_at_a_free_after_the_join)
{
  begin(256 * MIB);
  capture_begin(R);
  block x = take_written(X, R);
  machine_wait(handle(O), handle(R));
  read_on(&x, S, 0);
  mark_until_free(&x, S);
  machine_delay(handle(O), 0);
  machine_wait(handle(S), handle(O));
  machine_wait(handle(R), handle(S));
  give(&x);
  void *graph = capture_end(R);
  CHECK_EQ(machine_nodes(graph), 3);
  machine_launch(graph, handle(R));
  END();
}
