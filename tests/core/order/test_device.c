/* How a call reaches a device: set up at its first use, with a limit or without. */
#include "core/order/device.h"

#include "core/order/stream.h"
#include "one_world.h"

BEGIN(.devices = 2, .capacity = 256 * MIB)

TEST(a_device_that_could_not_be_set_up_is_tried_again)
{
  static const sim_call CALLS[] = {SIM_CALL_memory_info, SIM_CALL_memory_total, SIM_CALL_stream_id};
  for (int i = 0; i < 3; i++) {
    device_t *device;
    begin();
    CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.5)); /* what memory_info is asked for */
    sim_fail_call(w.s, CALLS[i], 1, ESPER_DEVICE_ERROR);
    CHECK_STATUS(core_device(w.core, 0, &device), ESPER_DEVICE_ERROR);
    CHECK(strstr(esper_last_error(), sim_call_name(CALLS[i])));
    CHECK_OK(core_used_device(w.core, 0, &device));
    CHECK(!device);
    CHECK_OK(core_device(w.core, 0, &device));
    CHECK_EQ(w.core->stream_count, 2);
    end();
  }
}

SCENE(without_host_memory_a_device_is_not_set_up)
{
  device_t *device;
  for (long mallocs = 0;; mallocs++) {
    CHECK(mallocs < 20);
    esper_status status = WITH_MALLOCS(mallocs, core_device(w.core, 0, &device));
    if (status == ESPER_OK)
      break;
    CHECK_REFUSED(status, ESPER_HOST_MEMORY, "device 0");
  }
  CHECK_EQ(w.core->stream_count, 2); /* what there was memory for was kept */
}

SCENE(a_limit_is_a_share_of_what_the_driver_says)
{
  device_t *device;
  CHECK_OK(core_device(w.core, 0, &device));
  CHECK_EQ(device->limit, SIZE_MAX);
  CHECK_OK(device_set_limit(device, 0.25));
  CHECK_EQ(device->limit, 64 * MIB);
  CHECK_OK(device_set_limit(device, 0));
  CHECK_EQ(device->limit, 0);
  uint64_t asked = calls(SIM_CALL_memory_info);
  CHECK_OK(device_set_limit(device, 1));
  CHECK_EQ(device->limit, SIZE_MAX);
  CHECK_EQ(calls(SIM_CALL_memory_info), asked); /* nothing to ask */
}

SCENE(a_limit_that_the_driver_cannot_help_with_changes_nothing)
{
  device_t *device;
  CHECK_OK(core_device(w.core, 0, &device));
  CHECK_OK(device_set_limit(device, 0.5));
  sim_fail_call(w.s, SIM_CALL_memory_info, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(device_set_limit(device, 0.25), ESPER_DEVICE_ERROR);
  CHECK_EQ(device->limit, 128 * MIB);
  CHECK_EQ(esper_get_memory_fraction(w.core, 0) * 100, 50);
}
