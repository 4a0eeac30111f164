/* Pages that other processes may open: their names, and that they stay. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "sharing_world.h"

/* ---- naming ---------------------------------------------------------------- */

SCENE(what_cannot_be_named_is_refused)
{
  esper_config classic = {.segments = ESPER_SEGMENTS_CLASSIC};
  esper_page_name *pages;
  size_t count;
  void *address, *p = get(5);
  CHECK_STATUS(esper_share(w.core, &w, &address, &pages, &count), ESPER_INVALID);
  world_free(&w, p);
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "no live block of a mapped segment"));
  CHECK_OK(esper_configure(w.core, &classic));
  p = get(50);
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_INVALID);
  CHECK(!pages && !count);
}

static void *share_what_is_freed(void *p)
{
  esper_page_name *pages;
  size_t count;
  void *address;
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_INVALID);
  CHECK(!pages && !count);
  return NULL;
}

static struct {
  void *block;
  pthread_t sharer;
} named_late;

/* Another thread's share waits for the pages that are just going. */
SIM_HOOK(share_and_free)
{
  void *p = named_late.block;
  if (!p)
    return;
  named_late.block = NULL;
  CHECK(!pthread_create(&named_late.sharer, NULL, share_what_is_freed, p));
  usleep(100000);
  world_free(&w, p);
}

SCENE(what_is_freed_before_it_is_named_is_refused)
{
  named_late.block = get(10);
  world_free(&w, get(10));
  sim_before_call(w.s, SIM_CALL_page_unmap, share_and_free, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_before_call(w.s, SIM_CALL_page_unmap, NULL, NULL);
  pthread_join(named_late.sharer, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  CHECK_EQ(alive().names, 0);
}

/* Memory of others grows and grows, always somebody's. */
static void *grow_and_shrink(void *over)
{
  while (!atomic_load((atomic_bool *)over)) {
    void *p;
    CHECK_OK(esper_malloc(w.core, 32 * MIB, (esper_stream){0}, &p));
    CHECK_OK(esper_free(w.core, p));
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  }
  return NULL;
}

SIM_HOOK(take_time)
{
  usleep(1000);
}

SCENE(who_shares_has_a_turn_while_the_memory_of_others_grows)
{
  enum { THREADS = 4 };
  atomic_bool over = false;
  pthread_t threads[THREADS];
  void *p = get(10);
  sim_before_call(w.s, SIM_CALL_page_map, take_time, NULL);
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_create(&threads[i], NULL, grow_and_shrink, &over));
  usleep(50000);
  alarm(300); /* without a turn this never ends */
  for (int i = 0; i < 5; i++) {
    sent x = share(p);
    CHECK(x.count > 0);
    free(x.pages);
  }
  alarm(0);
  atomic_store(&over, true);
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
}

SCENE(what_the_driver_refuses_to_name_is_named_later)
{
  void *p = get(12), *address;
  esper_page_name *pages;
  size_t count;
  sim_fail_call(w.s, SIM_CALL_page_export, 2, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_share(w.core, p, &address, &pages, &count), ESPER_DEVICE_ERROR);
  CHECK(!pages && !count);
  sent x = share(p);
  CHECK_EQ(x.count, 3);
  world_free(&w, p);
  sim_fail_call(w.s, SIM_CALL_page_unexport, 1, ESPER_DEVICE_ERROR);
  CHECK_EQ(esper_unshare(w.core), 2);
  CHECK_EQ(esper_unshare(w.core), 1);
  free(x.pages);
}

SCENE(there_may_be_no_host_memory)
{
  void *p = get(12), *address;
  esper_page_name *pages = NULL;
  size_t count;
  sim_alive before = alive();
  for (long calls = 0; calls < 3; calls++) { /* the list, and the page after the last one */
    esper_status status = WITH_MALLOCS(calls, esper_share(w.core, p, &address, &pages, &count));
    CHECK_STATUS(status, ESPER_HOST_MEMORY);
  }
  CHECK_EQ(before.mappings, alive().mappings);
  sent x = share(p);
  before = alive();
  CHECK_STATUS(WITH_MALLOCS(0, esper_open_shared(there, 0, x.pages, x.count, &x.base)),
               ESPER_HOST_MEMORY);
  sim_alive after = alive();
  CHECK(!x.base && !memcmp(&before, &after, sizeof before));
  free(x.pages);
}

/* ---- pages stay ------------------------------------------------------------ */

SCENE(shared_pages_neither_move_nor_go_back)
{
  void *p[4];
  for (int i = 0; i < 4; i++)
    p[i] = get(20);
  sent x = share(p[1]), y = share(p[3]);
  for (int i = 0; i < 4; i++)
    world_free(&w, p[i]);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 40 * MIB);
  uint64_t unmapped = calls(SIM_CALL_page_unmap);
  void *large = get(40); /* from where the first one is on */
  CHECK(large == p[1]);
  CHECK_EQ(calls(SIM_CALL_page_unmap), unmapped);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 60 * MIB);
  world_free(&w, large);
  CHECK(get(20) == p[1]); /* where they are they serve on */
  world_check(&w);
  free(x.pages);
  free(y.pages);
}

SCENE(what_is_not_live_can_be_unshared)
{
  void *p = get(20), *q = get(20), *a = world_malloc(&w, 512, r), *b = world_malloc(&w, 512, r);
  sent x = share(p), y = share(q), z = share(a);
  CHECK_EQ(esper_unshare(w.core), 0);
  world_free(&w, p);
  world_free(&w, a); /* b lies on its page */
  CHECK_EQ(esper_unshare(w.core), 5);
  CHECK_EQ(alive().names, y.count + 1);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 22 * MIB);
  CHECK_STATUS(esper_open_shared(there, 0, x.pages, x.count, &x.base), ESPER_INVALID);
  CHECK(!x.base && strstr(esper_last_error(), "nobody offers"));
  open_there(&y);
  open_there(&z);
  world_free(&w, q);
  world_free(&w, b);
  CHECK_EQ(esper_unshare(w.core), 6);
  CHECK_EQ(esper_unshare(w.core), 0);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  CHECK_EQ(alive().bytes, 22 * MIB); /* the other process has them */
  free(x.pages);
  close_there(&y);
  close_there(&z);
  CHECK_EQ(alive().bytes, 0);
}

TEST(the_memory_outlives_the_core_that_named_it)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN, .virtual_memory = 1};
  sim *device = sim_create(&options);
  esper_core *here;
  CHECK_OK(esper_core_create(sim_driver(device), NULL, &here));
  CHECK_OK(esper_core_create(sim_driver(device), NULL, &there));
  esper_stream st = {sim_stream_create(device, 0), 0, ESPER_STREAM_IMMORTAL};
  void *p, *address, *base;
  esper_page_name *pages;
  size_t count;
  CHECK_OK(esper_malloc(here, 9 * MIB, st, &p));
  CHECK_OK(esper_share(here, p, &address, &pages, &count));
  CHECK_OK(esper_open_shared(there, 0, pages, count, &base));
  esper_core_destroy(here);
  sim_alive now;
  sim_count_alive(device, 0, &now);
  CHECK(now.bytes >= 9 * MIB);
  CHECK_EQ(now.names, 0);
  CHECK_EQ(now.ranges, 1);
  sim_owner_begin(device, base, 9 * MIB, 0, st.handle);
  sim_kernel(device, 0, st.handle, base, 9 * MIB, SIM_READ);
  sim_owner_end(device, base);
  CHECK_OK(esper_close_shared(there, base));
  sim_count_alive(device, 0, &now);
  CHECK_EQ(now.bytes + now.ranges + now.mappings + now.pages, 0);
  esper_core_destroy(there);
  CHECK_EQ(sim_failures(device), 0);
  sim_destroy(device);
  free(pages);
}
