/* Marks: record_use, record_stream and related calls. */
#include "core/base/types.h"
#include "one_world.h"

static void begin(void)
{
  begin_on((sim_options){WHEN_TOLD, .devices = 2}, NULL);
}
static uint64_t uses(void)
{
  return world_counters(&w, 0).uses_pending;
}

static void *block(esper_stream stream)
{
  void *p = world_malloc(&w, 12 * MIB, stream);
  world_kernel(&w, stream, p);
  return p;
}

/* The events of many long-lived blocks go back as they complete, though nobody
 * allocates. */
SCENE(marks_ask_now_and_then_what_has_completed)
{
  enum { MANY = 4000 };
  void *p[MANY];
  for (int i = 0; i < MANY; i++)
    p[i] = world_malloc(&w, 512, r);
  for (int i = 0; i < MANY; i++) {
    world_use(&w, p[i], s, 0);
    world_run(&w, s);
  }
  CHECK(world_counters(&w, 0).events_created <= 128);
  CHECK(sim_calls(w.s, SIM_CALL_event_query) < MANY / 16);
}

SCENE(any_address_inside_will_do_and_foreign_ones_are_skipped)
{
  char *a = block(r), *b = block(r);
  const void *p[5] = {a + 12 * MIB - 1, &w, NULL, b, a + 513};
  size_t marked = 0;
  CHECK_OK(esper_record_use(w.core, p, 5, s, 0, &marked));
  CHECK_EQ(marked, 3);
  CHECK_EQ(uses(), 2);
  world_free(&w, a);
  CHECK_OK(esper_record_use(w.core, p, 1, s, 0, &marked)); /* freed */
  CHECK_EQ(marked, 0);
  CHECK_OK(esper_record_use(w.core, NULL, 0, s, 0, &marked));
  CHECK_EQ(marked, 0);
}

SCENE(another_device_can_read)
{
  esper_stream far = world_stream(&w, 1);
  void *p = block(r);
  world_read_marked(&w, far, p, r);
  world_free(&w, p);
  CHECK_EQ(world_counters(&w, 1).events_created, 1); /* its device's event */
  CHECK_EQ(world_counters(&w, 0).events_created, 0);
  world_run(&w, r);
  CHECK(world_malloc(&w, 12 * MIB, r) != p);
  world_run(&w, far);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
}

SCENE(marks_on_a_capturing_stream_are_counted)
{
  void *p = block(r);
  sim_capture_begin(w.s, 0, s.handle);
  sim_kernel(w.s, 0, s.handle, p, 512, SIM_READ);
  world_use(&w, p, s, 0);
  CHECK_EQ(world_counters(&w, 0).captured_uses, 1);
  sim_capture_abort(w.s, 0, s.handle);
}
