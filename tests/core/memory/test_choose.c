/* Which memory can go to sleep, which stays and why, and what of it is kept. */
#include "core/memory/choose.h"

#include <pthread.h>
#include <unistd.h>

#include "sleep/sleep_world.h"

TEST(classic_segments_stay_and_are_told)
{
  esper_config classic = {.segments = ESPER_SEGMENTS_CLASSIC};
  begin_with(256, &classic);
  void *p = used_as("weights", 20 * MIB, r), *q = used_as("weights", 30 * MIB, r);
  world_free(&w, p); /* a whole segment, which goes */
  esper_sleep_result result;
  CHECK_OK(try_sleep("weights", ESPER_KEEP_HOST, &result));
  CHECK_EQ(result.stays[ESPER_STAYS_CLASSIC], 30 * MIB);
  CHECK_EQ(result.given_back, 20 * MIB);
  CHECK(strstr(esper_stays_advice(ESPER_STAYS_CLASSIC), "ESPER_ALLOC_SEGMENTS=mapped"));
  world_kernel(&w, r, q); /* it is where it was */
  CHECK_OK(esper_tag_push("weights"));
  CHECK_STATUS(try_malloc(512, r), ESPER_ASLEEP);
  CHECK_OK(esper_tag_pop());
  wake("weights");
  end();
}

SCENE(pinned_segments_stay_and_are_told)
{
  void *p = used_as("weights", 20 * MIB, r), *segment;
  CHECK_OK(esper_pin(w.core, p, &segment));
  esper_sleep_result result;
  CHECK_OK(try_sleep("weights", ESPER_KEEP_HOST, &result));
  CHECK_EQ(result.stays[ESPER_STAYS_PINNED], 20 * MIB);
  CHECK_EQ(result.given_back, 0);
  world_kernel(&w, s, p);
  wake("weights");
}

SCENE(memory_with_a_fence_stays_and_counts_as_classic)
{
  void *p = used_as("weights", 20 * MIB, r);
  CHECK_OK(esper_fence(w.core, 1));
  void *q = used_as("weights", 4 * MIB, r);
  esper_sleep_result result;
  CHECK_OK(try_sleep("weights", ESPER_KEEP_HOST, &result));
  CHECK_EQ(result.stays[ESPER_STAYS_CLASSIC], 4 * MIB);
  CHECK_EQ(result.kept, 20 * MIB);
  world_kernel(&w, r, q);
  wake("weights");
  world_kernel(&w, r, p);
}

SCENE(a_list_of_pages_needs_host_memory)
{
  void *p = used_as("weights", 20 * MIB, r);
  esper_sleep_result result = {0};
  bool tags[TAGS] = {false};
  tags[tag_find("weights")] = true;
  device_t *device = &w.core->devices[0];
  choice_t choice = {
      .device = device, .tags = tags, .keeps = true, .list = sleeper_of, .result = &result};
  lock(&device->sleep_lock);
  for (long calls = 0; calls < 2; calls++) /* the list of pages, that of parcels */
    CHECK_STATUS(WITH_MALLOCS(calls, choose_pages(&choice)), ESPER_HOST_MEMORY);
  unlock(&device->sleep_lock);
  world_check(&w);
  sleep_all_of("weights");
  wake("weights");
  world_kernel(&w, r, p);
}

static pthread_t sleeping;

static void *put_to_sleep_now(void *result)
{
  CHECK_OK(try_sleep("t", ESPER_KEEP_HOST, result));
  return NULL;
}

static esper_sleep_result found;

static void when_exported(void *begun, sim_call call, int device, void *object)
{
  (void)call, (void)device, (void)object;
  if (*(bool *)begun)
    return;
  *(bool *)begun = true;
  CHECK(!pthread_create(&sleeping, NULL, put_to_sleep_now, &found));
  usleep(100000); /* if it does not wait, it goes wrong in this time */
}

SCENE(pages_that_are_being_shared_stay)
{
  void *p = used_as("t", 20 * MIB, r), *address;
  bool begun = false;
  esper_page_name *pages;
  size_t count;
  sim_before_call(w.s, SIM_CALL_page_export, when_exported, &begun);
  CHECK_OK(esper_share(w.core, p, &address, &pages, &count));
  CHECK(!pthread_join(sleeping, NULL));
  sim_before_call(w.s, SIM_CALL_page_export, NULL, NULL);
  CHECK(count && found.stays[ESPER_STAYS_SHARED] >= 20 * MIB);
  wake("t");
  free(pages);
}
