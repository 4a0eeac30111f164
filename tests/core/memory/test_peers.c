/* Devices that access other devices' pages. The simulation reports a kernel on a page that its
 * device has no access to. */
#include <pthread.h>
#include <unistd.h>

#include "core/base/types.h"
#include "one_world.h"
#include "core/base/core.h"
#include "core/order/device.h"

static esper_stream r, far;

static void begin(void)
{
  sim_options options = {.devices = 3,
                         .oracle = SIM_ORACLE_KNOWN,
                         .completion = SIM_WHEN_TOLD,
                         .virtual_memory = 1,
                         .capacity = 256 * MIB};
  esper_config pages_of_4_mib = {.large_segment_size = 4 * MIB};
  world_begin_with(&w, &options, &pages_of_4_mib);
  r = w.stream[0];
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

TEST(a_peer_may_access_what_is_mapped_later)
{
  begin();
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  CHECK_OK(esper_add_peer(w.core, 0, 2));
  void *p = get(30);
  CHECK(may(p, 1) && may(p, 2));
  CHECK_EQ(calls(SIM_CALL_page_access), 0);
  end();
}

TEST(access_goes_one_way)
{
  begin();
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  void *p = get(5), *q = world_malloc(&w, 5 * MIB, far);
  CHECK(may(p, 1) && !may(q, 0));
  CHECK_OK(esper_add_peer(w.core, 1, 0));
  CHECK(may(q, 0) && !may(q, 2));
  end();
}

TEST(what_makes_no_sense_is_refused)
{
  begin();
  CHECK_STATUS(esper_add_peer(w.core, 0, 3), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "no device 3"));
  CHECK_STATUS(esper_add_peer(w.core, -1, 0), ESPER_INVALID);
  CHECK_STATUS(esper_add_peer(w.core, 1, 1), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "cannot be its own peer"));
  end();
}

/* ---- the driver refuses ---------------------------------------------------- */

TEST(a_peer_out_of_reach_is_no_peer)
{
  begin();
  void *p = get(5);
  sim_set_reach(w.s, 0);
  CHECK_STATUS(esper_add_peer(w.core, 0, 1), ESPER_UNSUPPORTED);
  CHECK(strstr(esper_last_error(), "cannot access the memory of device 0"));
  sim_set_reach(w.s, 1);
  CHECK(!may(p, 1) && !may(get(7), 1));
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  CHECK(may(p, 1));
  end();
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

TEST(a_peer_for_which_there_is_no_host_memory_is_none)
{
  begin();
  void *p = get(30);
  check_limit_malloc(0);
  esper_status status = esper_add_peer(w.core, 0, 1);
  check_limit_malloc(-1);
  CHECK_STATUS(status, ESPER_HOST_MEMORY);
  CHECK(!may(p, 1));
  end();
}

/* ---- at the same time ------------------------------------------------------ */

static void *second;
static pthread_t other;
static int started;

static void *grow(void *unused)
{
  (void)unused;
  CHECK_OK(esper_malloc(w.core, 50 * MIB, w.stream[1], &second));
  return NULL;
}

static void *add(void *unused)
{
  (void)unused;
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  return NULL;
}

/* The other thread gets as far as it can. */
static void start(void *context, sim_call call, int device, void *object)
{
  (void)call, (void)device, (void)object;
  if (started++)
    return;
  CHECK(!pthread_create(&other, NULL, context == (void *)1 ? grow : add, NULL));
  usleep(50000);
}

TEST(a_peer_that_is_added_while_pages_go_back_has_the_others)
{
  begin();
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
  end();
}
