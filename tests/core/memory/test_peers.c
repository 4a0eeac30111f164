/* Devices that access other devices' pages. The simulation reports a kernel on a page that its
 * device has no access to. */
#include <pthread.h>
#include <unistd.h>

#include "core/base/types.h"
#include "one_world.h"
#include "core/base/core.h"
#include "core/order/device.h"

static esper_stream far;

static void begin(void)
{
  begin_on((sim_options){WHEN_TOLD, .devices = 3, .virtual_memory = 1, .capacity = 256 * MIB},
           &(esper_config){.large_segment_size = 4 * MIB});
  far = world_stream(&w, 1);
}

static void *get(size_t mib)
{
  return world_malloc(&w, mib * MIB, r);
}

static int may(const void *p, int device)
{
  return sim_may_access(w.s, device, p, world_size(&w, p));
}

/* ---- who may --------------------------------------------------------------- */

SCENE(a_peer_may_access_what_is_mapped_later)
{
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  CHECK_OK(esper_add_peer(w.core, 0, 2));
  void *p = get(30);
  CHECK(may(p, 1) && may(p, 2));
  CHECK_EQ(calls(SIM_CALL_page_access), 0);
}

SCENE(access_goes_one_way)
{
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  void *p = get(5), *q = world_malloc(&w, 5 * MIB, far);
  CHECK(may(p, 1) && !may(q, 0));
  CHECK_OK(esper_add_peer(w.core, 1, 0));
  CHECK(may(q, 0) && !may(q, 2));
}

SCENE(what_makes_no_sense_is_refused)
{
  CHECK_STATUS(esper_add_peer(w.core, 0, 3), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "no device 3"));
  CHECK_STATUS(esper_add_peer(w.core, -1, 0), ESPER_INVALID);
  CHECK_STATUS(esper_add_peer(w.core, 1, 1), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "cannot be its own peer"));
}

/* ---- the driver refuses ---------------------------------------------------- */

SCENE(a_peer_out_of_reach_is_no_peer)
{
  void *p = get(5);
  sim_set_reach(w.s, 0);
  CHECK_STATUS(esper_add_peer(w.core, 0, 1), ESPER_UNSUPPORTED);
  CHECK(strstr(esper_last_error(), "cannot access the memory of device 0"));
  sim_set_reach(w.s, 1);
  CHECK(!may(p, 1) && !may(get(7), 1));
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  CHECK(may(p, 1));
}

/* Whichever stretch is refused: what comes later is closed to the peer, until it is added. */
TEST(a_peer_that_is_refused_is_none)
{
  for (uint64_t nth = 1; nth <= 3; nth++) {
    begin();
    void *p = get(30), *small = world_malloc(&w, 512, r);
    void *q = world_malloc(&w, 6 * MIB, w.stream[1]);
    sim_fail_call(w.s, SIM_CALL_page_access, nth, ESPER_DEVICE_ERROR);
    CHECK_STATUS(esper_add_peer(w.core, 0, 1), ESPER_DEVICE_ERROR);
    CHECK(strstr(esper_last_error(), "page_access"));
    CHECK(!(may(p, 1) && may(small, 1) && may(q, 1)) && !may(get(9), 1));
    CHECK_EQ(calls(SIM_CALL_page_access), nth);
    CHECK_OK(esper_add_peer(w.core, 0, 1));
    CHECK(may(p, 1) && may(small, 1) && may(q, 1) && may(get(9), 1));
    end();
  }
}

SCENE(a_peer_for_which_there_is_no_host_memory_is_none)
{
  void *p = get(30);
  CHECK_STATUS(WITH_MALLOCS(0, esper_add_peer(w.core, 0, 1)), ESPER_HOST_MEMORY);
  CHECK(!may(p, 1));
}

/* ---- at the same time ------------------------------------------------------ */

static pthread_t other;
static int started;

static void *add(void *unused)
{
  (void)unused;
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  return NULL;
}

/* The other thread gets as far as it can. */
SIM_HOOK(start)
{
  if (started++)
    return;
  CHECK(!pthread_create(&other, NULL, add, NULL));
  usleep(50000);
}

SCENE(a_peer_that_is_added_while_pages_go_back_has_the_others)
{
  void *p[4];
  for (int i = 0; i < 4; i++)
    p[i] = get(20);
  world_free(&w, p[0]);
  world_free(&w, p[2]);
  started = 0;
  sim_after_call(w.s, SIM_CALL_page_release, start, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  pthread_join(other, NULL);
  CHECK(may(p[1], 1) && may(p[3], 1));
}
