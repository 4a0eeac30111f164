/* Pages of the driver: a refusal to create or map one is an answer, and what was made is undone. */
#include "core/memory/driver_pages.h"

#include "pages_world.h"

enum { PAGE = 4 };

/* Nothing that it says can be relied on (test_failure.c has what a failure is). */
SCENE(a_failed_device_is_asked_nothing)
{
  uint64_t page, none;
  uintptr_t range;
  get(2, r); /* sets the device up */
  device_t *device = &w.core->devices[0];
  const esper_driver *driver = sim_driver(w.s);
  CHECK_OK(driver->range_reserve(driver->self, 0, PAGE * MIB, &range));
  CHECK_OK(driver_page_add(device, range, PAGE * MIB, &page));
  sim_fail_call(w.s, SIM_CALL_page_unmap, 1, ESPER_DEVICE_ERROR);
  driver_page_unmap(device, range, PAGE * MIB);
  CHECK(world_has_failed(&w, 0));
  uint64_t before = calls(SIM_CALL_any);
  driver_page_unmap(device, range, PAGE * MIB);
  driver_page_release(device, page);
  driver_range_free(device, range, PAGE * MIB);
  CHECK_STATUS(driver_page_create(device, PAGE * MIB, &none), ESPER_DEVICE_ERROR);
  CHECK_STATUS(driver_page_map(device, range, PAGE * MIB, page), ESPER_DEVICE_ERROR);
  CHECK(strstr(esper_last_error(), "has failed"));
  CHECK_EQ(calls(SIM_CALL_any), before);
}
