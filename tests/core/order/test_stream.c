/* Streams: how they are found again. */
#include "core/order/stream.h"

#include "streams_world.h"

/* Whether ids of two devices can be equal, CUDA does not say. */
SCENE_WITH(the_same_id_on_another_device_is_another_stream,
           world_begin_with(&w, &(sim_options){.devices = 2}, NULL))
{
  device_t *devices = w.core->devices;
  stream_t *a = stream_create(w.core, &devices[0], 7, NULL);
  stream_t *b = stream_create(w.core, &devices[1], 7, NULL);
  CHECK(a != b && b->device == &devices[1]);
  CHECK(stream_create(w.core, &devices[0], 7, NULL) == a);
}

/* Streams that only read, each for a while: what is known of one serves the
 * next, and the numbers go on. */
SCENE(streams_that_come_and_go_take_no_memory)
{
  void *x = world_malloc(&w, 512, w.stream[0]);
  unsigned before = 0;
  uint64_t last = 0;
  for (int i = 0; i < 1000; i++) {
    esper_stream mortal = world_mortal(&w, 0);
    world_read_marked(&w, mortal, x, w.stream[0]);
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
}

static void present_own(void *stream)
{
  *(stream_t **)stream = present((esper_stream){(void *)2, 0, 0}).stream;
}

SCENE(a_special_handle_is_the_legacy_stream_or_the_threads_own)
{
  CHECK(present((esper_stream){NULL, 0, 0}).stream == device->legacy);
  CHECK(present((esper_stream){(void *)1, 0, 0}).stream == device->legacy);
  stream_t *mine, *again, *others;
  present_own(&mine);
  present_own(&again);
  CHECK(mine == again && mine != device->legacy);
  check_on_another_thread(present_own, &others);
  CHECK(others != mine);
}
