/* Which capture a thread works in: several at once, and bodies of conditional nodes. */
#include "core/order/capture_thread.h"

#include "captures_world.h"

static bool may_be_elsewhere(uint64_t capture)
{
  return capture_thread_may_be_elsewhere(w.core, capture);
}

/* ---- what its calls tell ----------------------------------------------------- */

static void work_nowhere(void *unused)
{
  (void)unused;
  CHECK(!may_be_elsewhere(7));
}

SCENE(a_thread_that_did_nothing_yet_is_nowhere_else)
{
  uint64_t capture = capture_begin();
  capture_thread_note(capture, present(r).stream); /* this thread */
  check_on_another_thread(work_nowhere, NULL);
  sim_capture_abort(w.s, 0, r.handle);
}

/* What a thread saw of one core tells another core nothing. */
SCENE(where_a_thread_works_is_remembered_for_one_core)
{
  esper_core *other;
  CHECK_OK(esper_core_create(sim_driver(w.s), NULL, &other));
  capture_thread_refused(w.core);
  CHECK(may_be_elsewhere(7));
  CHECK(!capture_thread_may_be_elsewhere(other, 7));
  esper_core_destroy(other);
}

/* ---- frees -------------------------------------------------------------------- */

/* The driver does not tell in which capture the thread allocates, or marks a use. So the thread is
 * refused, although it may be working in a body; but on a stream that the core knows its mark is
 * held. What it then frees of the outer capture has no point there, whether or not the core knows
 * the stream. */
TEST(a_thread_that_nobody_can_place_may_be_inside_a_body)
{
  for (int met = 0; met < 2; met++)
    for (int marks = 0; marks < 2; marks++) {
      begin();
      const void *x = block(X, r);
      void *p;
      if (met)
        world_use(&w, x, s, 0);
      capture_begin();
      world_wait(&w, t, r);
      void *y = block(Y, t);
      world_wait(&w, r, t);
      sim_capture_body(w.s, 0, r.handle, s.handle);
      sim_kernel(w.s, 0, s.handle, y, 512, SIM_READ); /* a node that t does not come after */
      sim_fail_call(w.s, SIM_CALL_stream_capture, 1, ESPER_DEVICE_ERROR);
      esper_status status =
          marks ? esper_record_use(w.core, &x, 1, s, 0, NULL) : esper_malloc(w.core, X, s, &p);
      CHECK_STATUS(status, marks && met ? ESPER_OK : ESPER_DEVICE_ERROR);
      world_free(&w, y);
      CHECK_EQ(sim_faults(w.s), 1);
      CHECK(block(Y, t) != y);
      CHECK(!sim_capture_end(w.s, 0, s.handle));
      world_wait(&w, r, t);
      capture_end();
      end();
    }
}

/* A thread that was refused outside any body frees where it always did. */
SCENE(a_thread_that_was_refused_in_the_capture_frees_there)
{
  capture_begin();
  void *x = block(X, r);
  sim_fail_call(w.s, SIM_CALL_stream_capture, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(try_malloc(X, r), ESPER_DEVICE_ERROR);
  world_free(&w, x);
  CHECK(block(X, r) == x);
  capture_end();
}
