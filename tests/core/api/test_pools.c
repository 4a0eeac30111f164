/* The public functions of pools and captures. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "core/base/types.h"
#include "core/order/device.h"
#include "core/order/record.h"
#include "pools/graph_pools.h"

static void *get(esper_pool *pool, size_t size)
{
  return world_malloc_from(&w, pool, size, r);
}

/* A cached segment of the default pool; whether it is still there. */
static bool is_cached(void)
{
  return world_stats(&w, 0).segment[ESPER_ALL].current > 0;
}

/* ---- pools ------------------------------------------------------------------ */

TEST(misuse_is_refused_and_changes_nothing)
{
  begin();
  CHECK_STATUS(esper_pool_begin(w.core, 0, 0, 0, all, NULL), ESPER_INVALID);
  CHECK_STATUS(esper_pool_begin(w.core, 9, ID, 0, all, NULL), ESPER_INVALID);
  CHECK_REFUSED(esper_pool_begin(w.core, 0, ID, 0, NULL, NULL), ESPER_INVALID, "without a filter");
  CHECK_REFUSED(esper_pool_end(w.core, 0, ID, 0, NULL), ESPER_INVALID, "never begun");
  CHECK_STATUS(esper_pool_release(w.core, 0, ID, 0), ESPER_INVALID);
  CHECK_EQ(references(ID), 0);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  CHECK_STATUS(esper_pool_begin(w.core, 0, ID, 0, all, NULL), ESPER_INVALID);
  CHECK_EQ(references(ID), 1);
  end(); /* with routes: they go with the core */
}

SCENE(references_are_of_private_pools)
{
  world_pool(&w, 0, 1, 2);
  CHECK_EQ(esper_pool_use_count(w.core, 0, 1, 2), 1);
  CHECK_EQ(esper_pool_use_count(w.core, 0, 0, 0), 0);
  CHECK_EQ(esper_pool_use_count(w.core, 0, 3, 4), 0);
  CHECK_EQ(esper_pool_use_count(w.core, 7, 1, 2), 0);
}

SCENE(pools_belong_to_a_device)
{
  esper_pool *a = world_pool(&w, 1, 1, 2), *none;
  void *p;
  CHECK_REFUSED(esper_malloc_from(w.core, a, 512, r, &p), ESPER_INVALID, "device 1");
  CHECK_STATUS(esper_pool_create(w.core, 2, 1, 2, &none), ESPER_INVALID);
  CHECK(!none);
}

/* The pool that is emptied, by its handle, while a free works in it. */
static esper_pool *emptied;

static void empty_it(void *context)
{
  (void)context;
  CHECK_OK(esper_empty_cache(w.core, 0, emptied));
}

static void empty_meanwhile(void *context, sim_call call, int device, void *stream)
{
  (void)call, (void)device;
  int *times = context;
  if (stream == s.handle && !(*times)++)
    check_on_another_thread(empty_it, NULL);
}

SCENE(a_pool_that_is_emptied_by_its_handle_keeps_what_a_call_works_in)
{
  int times = 0;
  emptied = world_pool(&w, 0, ID, 0);
  void *p = get(emptied, MIB), *other = get(emptied, MIB);
  sim_capture_begin(w.s, 0, r.handle);
  void *inside = get(emptied, MIB); /* in a heap that a quiesce unites with the other one */
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  world_free(&w, inside);
  world_read_on(&w, s, p, r);
  world_record_stream(&w, p, s);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  CHECK_OK(sim_device_synchronize(w.s, 0));
  sim_before_call(w.s, SIM_CALL_stream_capture, empty_meanwhile, &times);
  world_free(&w, p);
  sim_before_call(w.s, SIM_CALL_stream_capture, NULL, NULL);
  CHECK(times);
  world_check(&w);
  sim_graph_destroy(w.s, graph);
  world_free(&w, other);
  CHECK_OK(esper_empty_cache(w.core, 0, emptied));
  CHECK_EQ(reserved(), 0);
}

SCENE(a_pool_is_emptied_on_its_own_device)
{
  esper_pool *a = world_pool(&w, 1, 1, 2);
  CHECK_REFUSED(esper_empty_cache(w.core, 0, a), ESPER_INVALID, "name the pool's device");
  CHECK_OK(esper_empty_cache(w.core, 1, a));
}

SCENE(flags_can_be_taken_back_and_are_checked)
{
  esper_pool *pool = world_pool(&w, 0, ID, 0);
  CHECK_OK(esper_pool_set_flags(w.core, 0, ID, 0, ESPER_POOL_NO_SPLIT, ESPER_POOL_NO_SPLIT));
  CHECK_OK(esper_pool_set_flags(w.core, 0, ID, 0, ESPER_POOL_USE_ON_OOM, 0)); /* another one */
  CHECK_EQ(world_size(&w, get(pool, 512)), 2 * MIB);
  CHECK_OK(esper_pool_set_flags(w.core, 0, ID, 0, ESPER_POOL_NO_SPLIT, 0));
  CHECK_EQ(world_size(&w, get(pool, 512)), 512);
  CHECK_STATUS(esper_pool_set_flags(w.core, 0, ID, 0, 8, 8), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_flags(w.core, 3, ID, 0, 1, 1), ESPER_INVALID);
  CHECK_REFUSED(esper_pool_set_flags(w.core, 0, 9, 0, 1, 1), ESPER_INVALID, "(9, 0)");
  CHECK_OK(esper_pool_set_flags(w.core, 0, 9, 0, 1, 0)); /* as pools that go do */
  CHECK_STATUS(esper_pool_set_flags(w.core, 0, 0, 0, 1, 1), ESPER_INVALID);
}

static esper_status give_nothing(void *context, int device, size_t size, void **address)
{
  (void)context, (void)device, (void)size, (void)address;
  return ESPER_OUT_OF_MEMORY;
}

static void take_back(void *context, int device, void *address, size_t size)
{
  (void)context, (void)device, (void)address, (void)size;
  CHECK(false); /* nothing was given */
}

SCENE(an_allocator_is_chosen_once_and_early)
{
  esper_pool *pool = world_pool(&w, 0, ID, 0), *other = world_pool(&w, 0, 6, 0);
  esper_source half = {.obtain = give_nothing}, source = {give_nothing, take_back, NULL, NULL};
  void *p;
  CHECK_STATUS(esper_pool_set_source(w.core, 0, ID, 0, &half), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_source(w.core, 0, 9, 0, &source), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_source(w.core, 0, 0, 0, &source), ESPER_INVALID);
  CHECK_STATUS(esper_pool_set_source(w.core, 7, ID, 0, &source), ESPER_INVALID);
  CHECK_OK(esper_pool_set_source(w.core, 0, ID, 0, &source));
  CHECK_STATUS(esper_pool_set_source(w.core, 0, ID, 0, &source), ESPER_INVALID);
  get(other, 512);
  CHECK_STATUS(esper_pool_set_source(w.core, 0, 6, 0, &source), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "right after making the pool"));
  CHECK_STATUS(esper_malloc_from(w.core, pool, 512, r, &p), ESPER_OUT_OF_MEMORY);
}

SCENE(without_host_memory_no_pool_is_made_or_begun)
{
  world_malloc(&w, 512, r); /* the device starts */
  esper_pool *pool;
  CHECK_STATUS(WITH_MALLOCS(0, esper_pool_create(w.core, 0, ID, 0, &pool)), ESPER_HOST_MEMORY);
  CHECK_STATUS(WITH_MALLOCS(0, esper_pool_begin(w.core, 0, ID, 0, all, NULL)), ESPER_HOST_MEMORY);
  CHECK(!pool);
  CHECK_EQ(references(ID), 0);
  CHECK_STATUS(esper_pool_end(w.core, 0, ID, 0, NULL), ESPER_INVALID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
}

SCENE(figures_of_pools_are_of_devices_only)
{
  esper_pool_stats *pools;
  size_t count;
  CHECK_STATUS(esper_get_pool_stats(w.core, 9, &pools, &count), ESPER_INVALID);
  CHECK(!pools && !count);
  get(world_pool(&w, 0, ID, 0), 512);
  CHECK_STATUS(WITH_MALLOCS(0, esper_get_pool_stats(w.core, 0, &pools, &count)), ESPER_HOST_MEMORY);
  CHECK(!pools && !count);
}

/* ---- the default pool meanwhile ---------------------------------------------- */

SIM_HOOK(begin_pool_once)
{
  if (!(*(int *)context)++)
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
}

/* What is there stays there from the moment on when a capture may begin. */
SCENE(a_capture_begins_while_the_cache_goes)
{
  void *p[3];
  int times = 0;
  for (int i = 0; i < 3; i++)
    p[i] = world_malloc(&w, 20 * MIB, r);
  for (int i = 0; i < 3; i++)
    world_free(&w, p[i]);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 3);
  sim_before_call(w.s, SIM_CALL_memory_free, begin_pool_once, &times);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* in another thread */
  CHECK_EQ(times, 1);                           /* that one was on its way */
  sim_before_call(w.s, SIM_CALL_memory_free, NULL, NULL);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
}

/* Who announces captures says by that when there are none. */
SCENE(the_default_pool_stays_while_an_announced_capture_goes_on)
{
  int count = 0;
  esper_config config;
  esper_get_config(w.core, &config);
  config.captures_are_announced = 1;
  CHECK_OK(esper_configure(w.core, &config));
  world_free(&w, world_malloc(&w, 12 * MIB, r));
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, none, &count));
  CHECK_OK(esper_capture_begin(w.core, 0));
  CHECK_OK(esper_capture_begin(w.core, 0));
  CHECK_OK(esper_capture_end(w.core, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(is_cached());
  CHECK_OK(esper_capture_end(w.core, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(!is_cached());
  CHECK_REFUSED(esper_capture_end(w.core, 0), ESPER_INVALID, "device 0");
  CHECK_STATUS(esper_capture_begin(w.core, 9), ESPER_INVALID);
  CHECK_STATUS(esper_capture_end(w.core, 9), ESPER_INVALID);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
}

/* ---- captures ----------------------------------------------------------------- */

static bool announces;
static atomic_bool has_begun;

static void *begin_a_capture(void *unused)
{
  (void)unused;
  if (announces)
    CHECK_OK(esper_capture_begin(w.core, 0));
  else
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, none, &w.failures));
  atomic_store(&has_begun, true);
  return NULL;
}

/* Another thread begins one while this one is recording an event. */
static void begin_meanwhile(void *thread, sim_call call, int device, void *event)
{
  (void)call, (void)device, (void)event;
  CHECK(!pthread_create(thread, NULL, begin_a_capture, NULL));
  for (int i = 0; i < 100 && !atomic_load(&has_begun); i++)
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* An event for all streams would end the capture that begins next. */
TEST(a_capture_begins_after_the_event_that_is_being_recorded_for_all_streams)
{
  for (int how = 0; how < 2; how++) {
    pthread_t thread;
    announces = how;
    atomic_store(&has_begun, false);
    sim_options options = {WHEN_TOLD};
    world_begin_with(&w, &options, &(esper_config){.captures_are_announced = announces});
    world_free(&w, world_malloc(&w, 512, w.stream[0])); /* the core meets the device */
    sim_before_call(w.s, SIM_CALL_event_record_all, begin_meanwhile, &thread);
    stream_t *all_streams = w.core->devices[0].all_streams;
    record_t *record = stream_record_begin(&(presented_t){.stream = all_streams});
    bool too_early = atomic_load(&has_begun);
    CHECK(record);
    stream_record_end(all_streams, NULL);
    record_drop(record);
    CHECK(!pthread_join(thread, NULL));
    CHECK(!too_early && atomic_load(&has_begun));
    CHECK(!stream_record((presented_t){.stream = all_streams}));
    sim_before_call(w.s, SIM_CALL_event_record_all, NULL, NULL);
    if (announces)
      CHECK_OK(esper_capture_end(w.core, 0));
    end();
  }
}
