/* The counted calls of the driver. */
#include "core/base/call.h"

#include "world.h"

TEST(every_function_of_the_driver_has_a_counter_and_a_name)
{
  int count = 0;
  while (esper_driver_call_name(count))
    count++;
  CHECK_EQ(count, CALL_COUNT);
}

TEST(a_driver_that_is_being_unloaded_is_not_called_again)
{
  world w;
  size_t free_bytes, total;
  world_begin(&w);
  sim_fail_call(w.s, SIM_CALL_memory_info, 1, ESPER_SHUT_DOWN);
  CHECK_STATUS(call_memory_info(w.core, 0, &free_bytes, &total), ESPER_SHUT_DOWN);
  uint64_t asked = sim_calls(w.s, SIM_CALL_memory_info);
  CHECK_STATUS(call_memory_info(w.core, 0, &free_bytes, &total), ESPER_SHUT_DOWN);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_memory_info), asked);
  esper_core_destroy(w.core);
  sim_destroy(w.s);
}
