/* Segments: what the driver is asked for. */
#include <math.h>

#include "core/base/types.h"
#include "one_world.h"

static void begin(void)
{
  begin_on((sim_options){WHEN_TOLD, .capacity = 256 * MIB}, NULL);
}

static bool driver_was_asked;

SIM_HOOK(driver_has_host_memory)
{
  driver_was_asked = true;
  check_limit_malloc(-1);
}

SIM_HOOK(host_memory_runs_out)
{
  check_limit_malloc(0);
}

/* Whatever a segment needs is there before the driver is asked for memory, which might not
 * take it back. */
SCENE(without_host_memory_the_driver_is_not_asked)
{
  sim_before_call(w.s, SIM_CALL_memory_alloc, driver_has_host_memory, NULL);
  sim_after_call(w.s, SIM_CALL_memory_alloc, host_memory_runs_out, NULL);
  sim_fail_calls_from(w.s, SIM_CALL_memory_free, 1, ESPER_DEVICE_ERROR);
  void *p = NULL;
  for (long calls = 0; !driver_was_asked; calls++) {
    CHECK(calls < 100);
    esper_status status = WITH_MALLOCS(calls, esper_malloc(w.core, 12 * MIB, r, &p));
    CHECK_EQ(status, driver_was_asked ? ESPER_OK : ESPER_HOST_MEMORY);
    CHECK_EQ(reserved(), driver_was_asked ? 12 * MIB : 0);
    world_check(&w);
  }
  sim_owner_begin(w.s, p, 12 * MIB, 0, r.handle);
  sim_fail_call(w.s, SIM_CALL_memory_free, 0, ESPER_OK);
}

SCENE(the_largest_available_is_what_a_malloc_can_get)
{
  size_t most;
  void *p = world_malloc(&w, 100 * MIB, r), *q;
  CHECK_OK(esper_largest_available(w.core, 0, &most));
  CHECK_EQ(most, 156 * MIB);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.5));
  CHECK_OK(esper_largest_available(w.core, 0, &most));
  CHECK_EQ(most, 28 * MIB);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.25)); /* less than there is */
  CHECK_OK(esper_largest_available(w.core, 0, &most));
  CHECK_EQ(most, 0);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.5));
  world_free(&w, p);
  CHECK_OK(esper_largest_available(w.core, 0, &most));
  CHECK_EQ(most, 100 * MIB);
  CHECK_OK(esper_malloc(w.core, most, r, &q));
  CHECK(q == p);
  CHECK_OK(esper_free(w.core, q));
  CHECK_STATUS(esper_largest_available(w.core, 5, &most), ESPER_INVALID);
}
