/* Streams: how they are found again. */
#include "core/order/stream.h"

#include "streams_world.h"

TEST(a_stream_is_known_by_its_id)
{
  begin();
  esper_stream a = world_mortal(&w, 0);
  stream_t *first = present(a).stream;
  CHECK(present(a).stream == first);
  CHECK_EQ(first->id, sim_stream_id(w.s, 0, a.handle));
  record_t *outstanding = stream_record(present(a));
  world_destroy_stream(&w, a);
  esper_stream b = world_mortal(&w, 0);
  CHECK(b.handle == a.handle);
  CHECK(present(b).stream != first);
  CHECK_EQ(present(b).stream->id, sim_stream_id(w.s, 0, b.handle));
  record_drop(outstanding);
  end();
}

/* Whether ids of two devices can be equal, CUDA does not say. */
TEST(the_same_id_on_another_device_is_another_stream)
{
  sim_options options = {.devices = 2};
  world_begin_with(&w, &options, NULL);
  device_t *devices = w.core->devices;
  stream_t *a = stream_create(w.core, &devices[0], 7, NULL);
  stream_t *b = stream_create(w.core, &devices[1], 7, NULL);
  CHECK(a != b && b->device == &devices[1]);
  CHECK(stream_create(w.core, &devices[0], 7, NULL) == a);
  end();
}

TEST(an_immortal_stream_is_looked_up_without_the_driver)
{
  begin();
  stream_t *first = present(w.stream[3]).stream;
  uint64_t asked = sim_calls(w.s, SIM_CALL_stream_id);
  for (int i = 0; i < 10; i++)
    CHECK(present(w.stream[3]).stream == first);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_stream_id), asked);
  esper_stream mortal = world_mortal(&w, 0);
  for (int i = 0; i < 10; i++)
    present(mortal);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_stream_id), asked + 10);
  end();
}

/* Streams that only read, each for a while: what is known of one serves the
 * next, and the numbers go on. */
TEST(streams_that_come_and_go_take_no_memory)
{
  begin();
  void *x = world_malloc(&w, 512, w.stream[0]);
  unsigned before = 0;
  uint64_t last = 0;
  for (int i = 0; i < 1000; i++) {
    esper_stream mortal = world_mortal(&w, 0);
    world_read_on(&w, mortal, x, w.stream[0]);
    world_use(&w, x, mortal, 0);
    CHECK_EQ(present(mortal).stream->id, sim_stream_id(w.s, 0, mortal.handle));
    CHECK(present(mortal).stream->last > last);
    last = present(mortal).stream->last;
    world_run(&w, w.stream[0]);
    world_run(&w, mortal);
    world_destroy_stream(&w, mortal);
    if (i == 0)
      before = w.core->stream_count;
  }
  CHECK_EQ(w.core->stream_count, before);
  CHECK_EQ(world_counters(&w, 0).uses_pending, 1);
  end();
}

static void present_own(void *stream)
{
  *(stream_t **)stream = present((esper_stream){(void *)2, 0, 0}).stream;
}

TEST(a_special_handle_is_the_legacy_stream_or_the_threads_own)
{
  begin();
  CHECK(present((esper_stream){NULL, 0, 0}).stream == device->legacy);
  CHECK(present((esper_stream){(void *)1, 0, 0}).stream == device->legacy);
  stream_t *mine, *again, *others;
  present_own(&mine);
  present_own(&again);
  CHECK(mine == again && mine != device->legacy);
  check_on_another_thread(present_own, &others);
  CHECK(others != mine);
  end();
}

TEST(a_stream_is_found_by_its_index)
{
  enum { MANY = 3 * GROUP_STREAMS };
  begin();
  stream_t *made[MANY];
  for (int i = 0; i < MANY; i++)
    made[i] = present(world_stream(&w, 0)).stream;
  for (int i = 0; i < MANY; i++)
    CHECK(stream_at(w.core, made[i]->index) == made[i]);
  end();
}
