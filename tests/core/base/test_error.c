/* The calling thread's last failure, in words. */
#include "core/base/error.h"

#include "one_world.h"

TEST(the_sentence_is_kept_and_the_status_returned)
{
  CHECK_EQ(error_set(ESPER_INVALID, "there is no device %d", 7), ESPER_INVALID);
  CHECK(!strcmp(esper_last_error(), "there is no device 7"));
}

TEST(a_sentence_that_is_too_long_is_cut_off)
{
  CHECK_EQ(error_set(ESPER_INVALID, "%0*d", 2000, 0), ESPER_INVALID);
  CHECK(strlen(esper_last_error()) > 200);
  CHECK(strlen(esper_last_error()) < 2000);
}

static void fail_elsewhere(void *unused)
{
  (void)unused;
  error_set(ESPER_INVALID, "another thread's");
}

TEST(each_thread_has_its_own)
{
  error_set(ESPER_INVALID, "mine");
  check_on_another_thread(fail_elsewhere, NULL);
  CHECK(!strcmp(esper_last_error(), "mine"));
}

SCENE_WITH(the_drivers_last_error_becomes_the_cores, begin_on((sim_options){WHEN_TOLD}, NULL))
{
  sim_fail_call(w.s, SIM_CALL_memory_alloc, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(try_malloc(MIB, r), ESPER_DEVICE_ERROR);
  const esper_driver *driver = sim_driver(w.s);
  CHECK(!strcmp(esper_last_error(), driver->last_error(driver->self)));
}

TEST(every_status_has_a_name)
{
  for (int status = ESPER_OK; status <= ESPER_ASLEEP; status++)
    CHECK(!strncmp(esper_status_name((esper_status)status), "ESPER_", 6));
  CHECK(!strcmp(esper_status_name(ESPER_OK), "ESPER_OK"));
  CHECK(!strcmp(esper_status_name(ESPER_SHUT_DOWN), "ESPER_SHUT_DOWN"));
  CHECK(!strcmp(esper_status_name((esper_status)99), "unknown esper_status"));
}

TEST(after_a_shutdown_every_thread_is_told_why)
{
  begin_of(64);
  sim_fail_calls_from(w.s, SIM_CALL_stream_capture, 1, ESPER_SHUT_DOWN);
  CHECK_STATUS(try_malloc(3 * MIB, r), ESPER_SHUT_DOWN);
  CHECK(strstr(esper_last_error(), "CUDA has shut down"));
}
