/* What memory owes when a checkpoint of its pool is restored: every byte keeps its uses. */
#include "checkpoint_world.h"

/* Both parts of what was one block while it was read owe that read. */
TEST(uses_stay_on_the_bytes_they_are_of)
{
  for (int live = 0; live < 2; live++) {
    begin();
    void *a = get(6 * MIB, r), *b = get(6 * MIB, r);
    if (!live) {
      world_free(&w, b);
      world_free(&w, a);
      a = get(6 * MIB, r);
    }
    esper_checkpoint *checkpoint = take();
    world_free(&w, a);
    if (live)
      world_free(&w, b);
    void *whole = get(16 * MIB, r);
    CHECK(whole == a);
    world_kernel(&w, r, whole);
    read_and_free(whole, s);
    esper_checkpoint_delta delta = {0};
    CHECK_OK(esper_checkpoint_restore(w.core, checkpoint, &delta));
    for (size_t i = 0; i < delta.live_count; i++) {
      /* The oracle would say that the read is still running: it is. */
      CHECK(!sim_is_ordered(w.s, delta.live[i], 6 * MIB, 0, r.handle));
      CHECK_OK(esper_free(w.core, delta.live[i]));
    }
    free(delta.freed);
    world_check(&w);
    CHECK(world_counters(&w, 0).bytes_pending >= 12 * MIB);
    void *others[] = {get(6 * MIB, r), get(6 * MIB, r), get(6 * MIB, t)};
    for (int i = 0; i < 3; i++)
      CHECK((char *)others[i] + 6 * MIB <= (char *)a || (char *)others[i] >= (char *)a + 12 * MIB);
    world_run(&w, r);
    world_run(&w, s);
    CHECK(get(12 * MIB, r) == a);
    esper_checkpoint_free(checkpoint);
    end();
  }
}

SCENE(more_streams_than_can_be_noted_are_held)
{
  esper_checkpoint *checkpoint = take();
  void *a = get(12 * MIB, r);
  for (int i = 0; i < 70; i++) {
    esper_stream one = world_stream(&w, 0);
    world_read_on(&w, one, a, r);
    world_record_stream(&w, a, one);
  }
  free(restore(checkpoint, r).freed);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 1);
  CHECK(get(12 * MIB, r) != a);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* waits for the device */
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
  CHECK(get(12 * MIB, r) == a);
  esper_checkpoint_free(checkpoint);
}

/* A graph's output had a use by record_stream. The next capture of the pool gets its memory: the
 * pool's quiescing waits for a use that is held since the restore. */
TEST(a_capture_after_a_restore_gets_what_a_use_by_record_stream_held)
{
  for (int how = 0; how < 3; how++) {
    begin();
    capture_begin();
    sim_graph *first = capture_end();
    esper_checkpoint *checkpoint = take();
    capture_begin();
    void *out = block(12 * MIB, r);
    sim_graph *second = capture_end();
    sim_graph_launch(w.s, second, 0, r.handle);
    world_read_on(&w, s, out, r);
    world_record_stream(&w, out, s);
    esper_checkpoint_delta delta = restore(checkpoint, r);
    CHECK_EQ(delta.freed_count, 1);
    free(delta.freed);
    if (how == 1)
      world_free(&w, world_malloc(&w, MIB, s)); /* s presents itself */
    if (how == 2)
      CHECK_OK(esper_empty_cache(w.core, 0, NULL));
    capture_begin();
    CHECK(world_malloc(&w, 12 * MIB, r) == out);
    sim_graph *third = capture_end();
    CHECK_EQ(sim_pending(w.s, 0, s.handle), 0);
    sim_graph_destroy(w.s, first);
    sim_graph_destroy(w.s, second);
    sim_graph_destroy(w.s, third);
    esper_checkpoint_free(checkpoint);
    end();
  }
}

/* s reads p inside a capture. The read is marked exactly, or, if a checkpoint is to be taken before
 * it, until the free, which follows in the capture. */
static sim_graph *capture_read(void **p, esper_checkpoint **checkpoint)
{
  capture_begin();
  *p = block(12 * MIB, r);
  if (checkpoint)
    *checkpoint = take();
  world_wait(&w, s, r);
  sim_kernel(w.s, 0, s.handle, *p, 512, SIM_READ);
  if (checkpoint) {
    world_record_stream(&w, *p, s);
    world_free(&w, *p);
  } else {
    world_use(&w, *p, s, 0);
  }
  world_wait(&w, r, s);
  return capture_end();
}

/* The capture is over for the heap. No event stands for a point, so none holds the block: it waits
 * for the next quiesce. */
SCENE(a_use_inside_a_capture_gets_no_event_after_a_restore)
{
  void *p;
  esper_checkpoint *checkpoint = take();
  sim_graph *first = capture_read(&p, NULL);
  capture_begin();
  sim_graph *second = capture_end();
  free(restore(checkpoint, r).freed);
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
  world_malloc(&w, 512, s); /* s presents itself */
  world_check(&w);
  CHECK(get(12 * MIB, r) != p);
  capture_begin();
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  sim_graph *third = capture_end();
  sim_graph_destroy(w.s, first);
  sim_graph_destroy(w.s, second);
  sim_graph_destroy(w.s, third);
  esper_checkpoint_free(checkpoint);
}

/* The same where the use had ended inside a capture. The next quiesce waits for the reader itself:
 * no event stands for all streams, because t is being captured. */
SCENE(a_use_that_ended_inside_a_capture_lasts_until_the_next_free)
{
  void *p;
  world_malloc(&w, 512, t);
  esper_checkpoint *checkpoint;
  sim_graph *first = capture_read(&p, &checkpoint);
  esper_checkpoint_delta delta = restore(checkpoint, r);
  CHECK(delta.live_count == 1 && delta.live[0] == p);
  free(delta.freed);
  world_kernel(&w, r, p);
  world_read_on(&w, s, p, r);
  world_free(&w, p);
  world_check(&w);
  sim_capture_begin(w.s, 0, t.handle);
  capture_begin();
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK_EQ(sim_pending(w.s, 0, s.handle), 0);
  sim_graph *second = capture_end();
  sim_capture_abort(w.s, 0, t.handle);
  sim_graph_destroy(w.s, first);
  sim_graph_destroy(w.s, second);
  esper_checkpoint_free(checkpoint);
}
