/* Rule NEVER_WAITS: the allocator enqueues nothing on a program's stream but event records, and
 * inside captures nothing at all. Memory goes out on a stream only if everything that it owes has
 * completed, or lies on that stream, or, inside a capture, precedes the stream's next node by the
 * program's own edges. So whoever comes after all the work that the program gave the stream may use
 * it at once.
 *
 * Each test is an episode in which a core that makes streams wait would do so. Here it fails at
 * once, whether or not a follower is hurt. */
#include "roles.h"

static int is_of_program(void *handle)
{
  for (int i = 0; i < WORLD_STREAMS; i++)
    if (w.stream[i].handle == handle)
      return 1;
  return 0;
}

/* The core has streams of its own, which may wait. */
static void refuse(void *context, sim_call call, int device, void *stream)
{
  (void)context, (void)device;
  if (is_of_program(stream))
    check_failed(__FILE__, __LINE__, "%s on a stream of the program's", sim_call_name(call));
}

static void begin_with(sim_options options)
{
  begin_roles(options, NULL);
  static const sim_call CALLS[] = {SIM_CALL_stream_wait, SIM_CALL_copy_to_host,
                                   SIM_CALL_copy_to_device, SIM_CALL_memory_zero};
  for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++)
    sim_before_call(w.s, CALLS[i], refuse, NULL);
}

/* A device that holds `mib`: if that is all taken, the next malloc must reuse. */
static void begin(size_t mib)
{
  begin_with((sim_options){.capacity = mib * MIB});
}

static void begin_mapped(size_t mib)
{
  begin_with((sim_options){.capacity = mib * MIB, .virtual_memory = 1});
}

/* t comes after all that r was given, r is given memory, and t is the first to use it. */
static void *first_on_t(size_t mib)
{
  world_wait(&w, t, r);
  void *p = world_malloc(&w, mib * MIB, r); /* the oracle asks for t, too */
  world_kernel(&w, t, p);
  world_use(&w, p, t, 0);
  return p;
}

/* ---- uses ------------------------------------------------------------------------- */

typedef enum { BY_MARK, BY_MARK_UNTIL_FREE, BY_RECORD_STREAM, BY_NOTE, BY_EVENT, MARKS } marked_t;

static void mark_by(marked_t how, const void *p, esper_stream reader)
{
  void *event;
  switch (how) {
  case BY_MARK: world_use(&w, p, reader, 0); break;
  case BY_MARK_UNTIL_FREE: world_use(&w, p, reader, ESPER_USE_UNTIL_FREE); break;
  case BY_RECORD_STREAM: world_record_stream(&w, p, reader); break;
  case BY_NOTE: CHECK_OK(esper_note_use(w.core, &p, 1, reader)); break;
  default:
    event = sim_event_create(w.s, 0);
    CHECK_OK(sim_event_record(w.s, 0, event, reader.handle));
    CHECK_OK(esper_record_use_event(w.core, &p, 1, event, 0, NULL));
    sim_event_destroy(w.s, 0, event);
  }
}

/* x is all that there is, and s still reads it. */
static void check_a_use_completes_before_its_memory_goes_out(marked_t how)
{
  begin(X);
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  mark_by(how, x, s);
  world_free(&w, x);
  CHECK(first_on_t(X) == x); /* the host has waited for s */
  end();
}

TEST(a_marked_use_completes_before_its_memory_goes_out)
{
  check_a_use_completes_before_its_memory_goes_out(BY_MARK);
}

TEST(a_use_marked_until_the_free_completes_before_its_memory_goes_out)
{
  check_a_use_completes_before_its_memory_goes_out(BY_MARK_UNTIL_FREE);
}

TEST(a_use_by_record_stream_completes_before_its_memory_goes_out)
{
  check_a_use_completes_before_its_memory_goes_out(BY_RECORD_STREAM);
}

TEST(a_noted_use_completes_before_its_memory_goes_out)
{
  check_a_use_completes_before_its_memory_goes_out(BY_NOTE);
}

TEST(a_use_until_an_event_completes_before_its_memory_goes_out)
{
  check_a_use_completes_before_its_memory_goes_out(BY_EVENT);
}

/* What s waits for is raised by r, which has yet to be told so. No stream waits for s, and the host
 * not for ever. */
TEST(nobody_waits_for_work_that_waits_for_what_comes_later)
{
  for (marked_t how = 0; how < MARKS; how++) {
    begin(64);
    void *x = block(X, r);
    world_wait(&w, s, r);
    sim_wait_flag(w.s, 0, s.handle, 0);
    sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
    mark_by(how, x, s);
    world_free(&w, x);
    CHECK(first_on_t(X) != x);
    sim_raise_flag(w.s, 0, r.handle, 0);
    sim_run_all(w.s);
    CHECK_EQ(sim_pending_all(w.s), 0);
    end();
  }
}

/* More than any allowance waits for s, and the device has more than enough. */
TEST(with_plenty_of_memory_the_host_waits_and_no_stream_does)
{
  for (marked_t how = 0; how < MARKS; how++) {
    begin(16 << 10);
    for (int i = 0; i < 64; i++) {
      void *x = first_on_t(Z);
      world_read_on(&w, s, x, t);
      mark_by(how, x, s);
      world_free(&w, x);
    }
    end();
  }
}

/* r's own work needs nobody's wait. */
TEST(what_lies_on_the_stream_itself_goes_out_at_once)
{
  begin(X);
  void *x = block(X, r);
  world_use(&w, x, r, 0);
  world_free(&w, x);
  size_t pending = sim_pending(w.s, 0, r.handle);
  CHECK(first_on_t(X) == x);
  CHECK(sim_pending(w.s, 0, r.handle) >= pending); /* nor the host's */
  end();
}

/* That r comes after s by the program says nothing of what the core knows: it waits, or uses other
 * memory. */
TEST(what_the_program_made_the_stream_wait_for_goes_out_without_a_wait_of_the_cores)
{
  begin(X);
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  world_wait(&w, r, s);
  CHECK(first_on_t(X) == x);
  end();
}

/* ---- nothing is shared between streams --------------------------------------------- */

TEST(memory_of_another_stream_has_completed_when_it_goes_out)
{
  begin(X);
  void *x = block(X, s);
  world_free(&w, x);
  CHECK(first_on_t(X) == x);
  end();
}

TEST(memory_of_many_other_streams_has_completed_when_it_goes_out)
{
  begin(X + Y + 8);
  void *x = block(X, s), *y = block(Y, o);
  world_free(&w, x);
  world_free(&w, y);
  first_on_t(X + Y + 4); /* goes back to the device first */
  end();
}

TEST(pages_of_another_stream_have_completed_when_they_go_out)
{
  begin_mapped(64);
  void *x = block(20, s), *y = block(20, s), *z = block(20, s);
  world_free(&w, x);
  world_free(&w, z);
  first_on_t(40); /* y lies between them */
  world_kernel(&w, s, y);
  end();
}

/* b keeps the segment s's, so a is lent. */
TEST(what_is_lent_has_completed)
{
  begin(20);
  void *a = block(9, s), *b = block(9, s);
  world_free(&w, a);
  CHECK(first_on_t(9) == a);
  world_kernel(&w, s, b);
  end();
}

/* r has borrowed a, and its follower o, that nobody names, has read it. s wants it back. */
TEST(what_was_lent_has_completed_when_it_comes_back)
{
  begin(20);
  void *a = block(9, s), *b = block(9, s);
  world_free(&w, a);
  world_run(&w, s);
  void *lent = block(9, r);
  CHECK(lent == a);
  world_read_on(&w, o, lent, r);
  world_free(&w, lent);
  world_wait(&w, t, s);
  void *again = world_malloc(&w, 9 * MIB, s);
  CHECK(again == a);
  world_kernel(&w, t, again);
  world_use(&w, again, t, 0);
  world_kernel(&w, s, b);
  end();
}

/* ---- a run of neighbours ------------------------------------------------------------ */

/* Each is read by another stream, so they stay apart when they are freed. */
TEST(all_of_a_run_of_neighbours_has_completed)
{
  for (marked_t how = 0; how < MARKS; how++) {
    begin(20);
    void *a = block(6, r), *b = block(6, r), *c = block(8, r);
    CHECK((char *)c == (char *)a + 12 * MIB);
    world_read_on(&w, s, a, r);
    mark_by(how, a, s);
    world_read_on(&w, o, b, r);
    mark_by(how, b, o);
    world_read_on(&w, s, c, r);
    mark_by(how, c, s);
    world_free(&w, a);
    world_free(&w, b);
    world_free(&w, c);
    CHECK(first_on_t(16) == a);
    end();
  }
}

/* A run of which only one part lies on r itself. */
TEST(a_run_waits_for_its_part_that_is_still_read)
{
  begin(20);
  void *a = block(9, r), *b = block(9, r);
  CHECK((char *)b == (char *)a + 9 * MIB);
  world_read_on(&w, s, a, r);
  world_use(&w, a, s, 0);
  world_free(&w, a);
  world_free(&w, b);
  CHECK(first_on_t(18) == a);
  end();
}

/* ---- captures ------------------------------------------------------------------------ */

/* The graph has the nodes that the program made, and its launch runs. */
static void capture_end(size_t nodes)
{
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  CHECK_EQ(sim_graph_nodes(graph), nodes);
  sim_graph_launch(w.s, graph, 0, r.handle);
  sim_graph_destroy(w.s, graph);
}

static int any_stream(void *context, void *stream)
{
  (void)context, (void)stream;
  return 1;
}

/* In a private pool, whose addresses should repeat, or without the core's knowledge. */
static void capture_begin(int with_pool)
{
  begin(256);
  if (with_pool)
    CHECK_OK(esper_pool_begin(w.core, 0, 7, 0, any_stream, NULL));
  sim_capture_begin(w.s, 0, r.handle);
}

static void capture_over(int with_pool)
{
  if (with_pool) {
    CHECK_OK(esper_pool_end(w.core, 0, 7, 0, NULL));
    CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
  }
  end();
}

/* s may still read x when r's next node runs. t comes after r's last node. */
static void check_captured_use(marked_t how, int with_pool)
{
  capture_begin(with_pool);
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  mark_by(how, x, s);
  world_wait(&w, t, r);
  world_free(&w, x);
  void *y = world_malloc(&w, X * MIB, r);
  CHECK(y != x);
  world_kernel(&w, t, y);
  world_wait(&w, r, s); /* now the program's own edges say that s is done */
  world_wait(&w, t, r);
  void *z = world_malloc(&w, X * MIB, r);
  world_kernel(&w, t, z);
  world_wait(&w, r, t);
  capture_end(4);
  capture_over(with_pool);
}

TEST(inside_a_capture_a_use_holds_until_the_programs_edges_say_that_it_is_over)
{
  for (marked_t how = 0; how < BY_EVENT; how++)
    for (int with_pool = 0; with_pool < 2; with_pool++)
      check_captured_use(how, with_pool);
}

/* What precedes r's next node by the program's edges serves again. */
TEST(inside_a_capture_what_the_programs_edges_order_serves_again)
{
  capture_begin(1);
  void *x = block(X, r);
  world_read_on(&w, s, x, r);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  world_wait(&w, r, s);
  world_wait(&w, t, r);
  void *y = world_malloc(&w, X * MIB, r);
  CHECK(y == x);
  world_kernel(&w, t, y);
  world_wait(&w, r, t);
  capture_end(3);
  capture_over(1);
}

/* Its own stream's memory serves that stream, and its followers. */
TEST(inside_a_capture_the_streams_own_memory_serves_again)
{
  capture_begin(1);
  void *x = block(X, r);
  world_free(&w, x);
  CHECK(first_on_t(X) == x);
  world_wait(&w, r, t);
  capture_end(2);
  capture_over(1);
}

/* s frees memory of its own branch; r does not come after it. */
TEST(inside_a_capture_a_branch_gets_no_memory_of_another)
{
  for (int with_pool = 0; with_pool < 2; with_pool++) {
    capture_begin(with_pool);
    block(512 / (int)KIB + 1, r);
    world_wait(&w, s, r);
    void *x = block(X, s);
    world_free(&w, x);
    void *y = first_on_t(X);
    CHECK(y != x);
    world_wait(&w, r, s);
    world_wait(&w, r, t);
    capture_end(3);
    capture_over(with_pool);
  }
}

/* The marked stream has two tails, and the graph gets no node for that. */
TEST(inside_a_capture_no_node_is_added_for_a_mark)
{
  capture_begin(1);
  void *x = block(X, r);
  world_wait(&w, s, r);
  world_wait(&w, o, r);
  sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
  sim_kernel(w.s, 0, o.handle, x, X * MIB, SIM_READ);
  world_wait(&w, s, o);
  world_use(&w, x, s, 0);
  world_free(&w, x);
  CHECK(first_on_t(X) != x);
  world_wait(&w, r, s);
  world_wait(&w, r, t);
  capture_end(4);
  capture_over(1);
}

/* r comes after all of s, which has two tails, when x is freed and its use ends. A node that s got
 * now would not be joined, and the capture would fail. */
TEST(inside_a_capture_no_node_is_added_at_a_free_after_the_join)
{
  capture_begin(0);
  void *x = block(X, r);
  world_wait(&w, s, r);
  world_wait(&w, o, r);
  sim_kernel(w.s, 0, s.handle, x, X * MIB, SIM_READ);
  world_record_stream(&w, x, s);
  sim_kernel(w.s, 0, o.handle, NULL, 0, SIM_READ);
  world_wait(&w, s, o);
  world_wait(&w, r, s);
  world_free(&w, x);
  capture_end(3);
  capture_over(0);
}
