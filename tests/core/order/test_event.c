/* Events and records that are out of use. */
#include "core/order/event.h"

#include "streams_world.h"

SCENE(an_event_that_the_driver_refuses_is_none)
{
  void *a = event_take(device);
  sim_fail_call(w.s, SIM_CALL_event_create, 1, ESPER_OUT_OF_MEMORY);
  CHECK(!event_take(device));
  CHECK(strstr(esper_last_error(), "event_create"));
  CHECK_EQ(device->events_alive, 1);
  CHECK_EQ(device->events_created, 1);
  void *b = event_take(device);
  CHECK(b && b != a);
  event_give(device, a);
  event_give(device, b);
}

/* An event that could not be given back without host memory is not made. */
SCENE(without_host_memory_the_driver_makes_no_event)
{
  CHECK(!WITH_MALLOCS(0, event_take(device)));
  CHECK(strstr(esper_last_error(), "no host memory for an event"));
  CHECK_EQ(sim_calls(w.s, SIM_CALL_event_create), 0);
  CHECK_EQ(device->events_alive, 0);
  event_give(device, event_take(device));
}

SCENE(without_host_memory_there_is_no_record)
{
  enum { MOST = 8192 };
  static record_t *taken[MOST];
  int count = 0;
  check_limit_malloc(0);
  while (count < MOST && (taken[count] = record_take(device)))
    count++;
  check_limit_malloc(-1);
  CHECK(count < MOST); /* those that there was memory for */
  while (count)
    record_give(device, taken[--count]);
  record_t *record = record_take(device);
  CHECK(record);
  record_give(device, record);
}
