/* The public interface: lifetime of a core, errors, figures. */
#include <pthread.h>

#include "core/base/types.h"
#include "world.h"

TEST(statuses_have_names)
{
  CHECK(!strcmp(esper_status_name(ESPER_OK), "ESPER_OK"));
  CHECK(!strcmp(esper_status_name(ESPER_SHUT_DOWN), "ESPER_SHUT_DOWN"));
  CHECK(esper_status_name((esper_status)99)[0]);
  CHECK(esper_last_error());
}

TEST(making_a_core_wakes_no_device)
{
  sim *s = sim_create(NULL);
  esper_core *core;
  CHECK_OK(esper_core_create(sim_driver(s), NULL, &core));
  CHECK_EQ(sim_calls(s, SIM_CALL_any), sim_calls(s, SIM_CALL_device_count));
  CHECK_EQ(esper_device_count(core), 1);
  CHECK(esper_core_is_valid(core));
  esper_core_destroy(core);
  esper_core_destroy(NULL);
  sim_destroy(s);
}

TEST(a_core_that_cannot_be_made_says_why)
{
  sim *s = sim_create(NULL);
  esper_core *core;
  sim_fail_call(s, SIM_CALL_device_count, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_core_create(sim_driver(s), NULL, &core), ESPER_DEVICE_ERROR);
  CHECK(!core);
  CHECK(strstr(esper_last_error(), "device_count"));
  sim_destroy(s);
}

TEST(destroy_gives_live_memory_back_too)
{
  world w;
  sim_options options = {.devices = 2};
  world_begin_with(&w, &options, NULL);
  void *p;
  for (int d = 0; d < 2; d++) {
    esper_stream a = world_stream(&w, d), b = world_stream(&w, 1 - d);
    for (int i = 0; i < 20; i++) {
      CHECK_OK(esper_malloc(w.core, (size_t)1 << i, a, &p));
      CHECK_OK(esper_record_stream(w.core, p, b));
      world_use(&w, p, b, 0);
      if (i % 2)
        CHECK_OK(esper_free(w.core, p));
    }
  }
  esper_core_destroy(w.core);
  for (int d = 0; d < 2; d++) {
    sim_alive alive;
    sim_count_alive(w.s, d, &alive);
    CHECK_EQ(alive.bytes, 0);
    CHECK_EQ(alive.events, 0);
    CHECK_EQ(alive.streams, 0);
  }
  sim_destroy(w.s);
}

TEST(cores_do_not_mix)
{
  world a, b;
  world_begin(&a);
  world_begin(&b);
  void *p = world_malloc(&a, 512, a.stream[0]);
  CHECK_STATUS(esper_free(b.core, p), ESPER_INVALID);
  esper_block_info info;
  CHECK_STATUS(esper_find_block(b.core, p, &info), ESPER_INVALID);
  world_end(&a);
  world_end(&b);
}

TEST(devices_that_are_not_there_are_refused)
{
  world w;
  world_begin(&w);
  void *p = &w;
  size_t size, total;
  esper_counters counters;
  for (int device = -2; device < 4; device += 3) {
    esper_stream stream = {NULL, device, 0};
    p = &w;
    CHECK_STATUS(esper_malloc(w.core, 512, stream, &p), ESPER_INVALID);
    CHECK(!p);
    CHECK(strstr(esper_last_error(), "no device"));
    CHECK_STATUS(esper_empty_cache(w.core, device, NULL), ESPER_INVALID);
    CHECK_STATUS(esper_get_counters(w.core, device, &counters), ESPER_INVALID);
    CHECK_STATUS(esper_memory_info(w.core, device, &size, &total), ESPER_INVALID);
    esper_retire(w.core, device);
  }
  world_end(&w);
}

TEST(errors_belong_to_their_thread)
{
  world w;
  world_begin(&w);
  CHECK_STATUS(esper_free(w.core, &w), ESPER_INVALID);
  char mine[512];
  snprintf(mine, sizeof mine, "%s", esper_last_error());
  pthread_t thread;
  esper_core *core = w.core;
  extern void *other_error(void *);
  pthread_create(&thread, NULL, other_error, core);
  pthread_join(thread, NULL);
  CHECK(!strcmp(mine, esper_last_error()));
  world_end(&w);
}

void *other_error(void *core);
void *other_error(void *core)
{
  size_t largest;
  esper_largest_available(core, 77, &largest);
  return NULL;
}

TEST(driver_calls_are_counted_by_name)
{
  world w;
  world_begin(&w);
  void *p = world_malloc(&w, 512, w.stream[0]);
  world_read_on(&w, w.stream[1], p, w.stream[0]);
  world_use(&w, p, w.stream[1], 0);
  uint64_t counted = 0;
  int names = 0;
  for (; esper_driver_call_name(names); names++) {
    int call = 0;
    while (strcmp(sim_call_name((sim_call)call), esper_driver_call_name(names)))
      CHECK(++call < SIM_CALL_COUNT);
    CHECK_EQ(esper_driver_calls(w.core, names), sim_calls(w.s, (sim_call)call));
    counted += esper_driver_calls(w.core, names);
  }
  CHECK(names > 10);
  CHECK_EQ(counted + sim_calls(w.s, SIM_CALL_device_count), sim_calls(w.s, SIM_CALL_any));
  CHECK(!esper_driver_call_name(-1));
  CHECK_EQ(esper_driver_calls(w.core, names), 0);
  world_end(&w);
}

TEST(find_block_knows_any_address_inside)
{
  world w;
  world_begin(&w);
  char *p = world_malloc(&w, 5000, w.stream[2]);
  esper_block_info info;
  CHECK_OK(esper_find_block(w.core, p + 4999, &info));
  CHECK(info.address == p && info.live && info.stream == w.stream[2].handle);
  CHECK_EQ(info.size, 5120);
  CHECK_EQ(info.requested, 5000);
  CHECK(info.segment_address == p);
  CHECK_EQ(info.segment_size, 2 * MIB);
  world_end(&w);
}

TEST(a_driver_that_goes_away_is_left_alone)
{
  world w;
  world_begin(&w);
  void *p, *q;
  CHECK_OK(esper_malloc(w.core, 512, w.stream[0], &p));
  CHECK_OK(esper_record_stream(w.core, p, w.stream[1]));
  sim_fail_call(w.s, SIM_CALL_any, 1, ESPER_SHUT_DOWN);
  CHECK_OK(esper_free(w.core, p)); /* silent */
  uint64_t calls = sim_calls(w.s, SIM_CALL_any);
  CHECK_STATUS(esper_malloc(w.core, 12 * MIB, w.stream[0], &q), ESPER_SHUT_DOWN);
  CHECK(!q);
  CHECK_OK(esper_free(w.core, NULL));
  esper_retire(w.core, 0);
  CHECK(esper_core_is_valid(w.core));
  esper_core_destroy(w.core);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_any), calls);
  sim_destroy(w.s);
}

/* One picture of a busy core: what threads do is never half seen. */
static world shared;
static _Atomic int threads_left;

/* The driver would make a context there, of some hundred MiB. */
TEST(who_only_looks_wakes_no_device)
{
  world w;
  sim_options options = {.devices = 2, .capacity = 1000 * MIB};
  world_begin_with(&w, &options, NULL);
  world_free(&w, world_malloc(&w, 3 * MIB, w.stream[0]));
  uint64_t calls = sim_calls(w.s, SIM_CALL_memory_total);
  esper_stats stats;
  esper_counters counters;
  esper_pool_stats *pools;
  esper_gate_entry *gates;
  size_t count;
  CHECK_OK(esper_empty_cache(w.core, 1, NULL));
  CHECK_OK(esper_pool_empty(w.core, 1, 7, 0));
  CHECK_OK(esper_get_stats(w.core, 1, &stats));
  CHECK_EQ(stats.max_split_size, -1);
  CHECK_EQ(stats.reserved_bytes[ESPER_ALL].peak, 0);
  CHECK_OK(esper_reset_peak_stats(w.core, 1));
  CHECK_OK(esper_reset_accumulated_stats(w.core, 1));
  CHECK_OK(esper_get_counters(w.core, 1, &counters));
  CHECK_OK(esper_gates_copy(w.core, 1, &gates, &count));
  CHECK_EQ(count, 0);
  CHECK_OK(esper_get_pool_stats(w.core, 1, &pools, &count));
  CHECK_EQ(count, 0);
  CHECK_OK(esper_set_memory_fraction(w.core, 1, 0.25));
  CHECK(esper_get_memory_fraction(w.core, 1) == 0.25);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_memory_total), calls);
  CHECK_STATUS(esper_empty_cache(w.core, 2, NULL), ESPER_INVALID);
  CHECK_STATUS(esper_get_stats(w.core, 2, &stats), ESPER_INVALID);
  CHECK_STATUS(esper_set_memory_fraction(w.core, 2, 0.5), ESPER_INVALID);
  /* The fraction holds from the first use on. */
  esper_stream other = world_stream(&w, 1);
  void *p;
  CHECK_STATUS(esper_malloc(w.core, 260 * MIB, other, &p), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(sim_calls(w.s, SIM_CALL_memory_total), calls + 1);
  world_free(&w, world_malloc(&w, 240 * MIB, other));
  world_end(&w);
}

static void *churn(void *argument)
{
  esper_stream own = shared.stream[(intptr_t)argument];
  void *p[16] = {0};
  for (int i = 0; i < 6000; i++) {
    int k = i * 7 % 16;
    CHECK_OK(esper_free(shared.core, p[k]));
    CHECK_OK(esper_malloc(shared.core, (size_t)(i % 40 + 1) * 40000, own, &p[k]));
  }
  for (int k = 0; k < 16; k++)
    CHECK_OK(esper_free(shared.core, p[k]));
  atomic_fetch_sub(&threads_left, 1);
  return NULL;
}

TEST(figures_agree_at_any_moment)
{
  sim_options options = {0};
  world_begin_with(&shared, &options, NULL);
  pthread_t thread[3];
  atomic_store(&threads_left, 3);
  for (intptr_t i = 0; i < 3; i++)
    pthread_create(&thread[i], NULL, churn, (void *)i);
  while (atomic_load(&threads_left)) {
    CHECK(esper_core_is_valid(shared.core));
    esper_stats stats = world_stats(&shared, 0);
    CHECK(stats.allocated_bytes[ESPER_ALL].current <= stats.active_bytes[ESPER_ALL].current);
    CHECK(stats.active_bytes[ESPER_ALL].current <= stats.reserved_bytes[ESPER_ALL].current);
    CHECK_EQ(stats.allocated_bytes[ESPER_ALL].current,
             stats.allocated_bytes[ESPER_SMALL].current +
                 stats.allocated_bytes[ESPER_LARGE].current);
    for (int c = 0; c < ESPER_CLASSES; c++)
      CHECK_EQ(stats.allocated_bytes[c].current,
               stats.allocated_bytes[c].allocated - stats.allocated_bytes[c].freed);
  }
  for (int i = 0; i < 3; i++)
    pthread_join(thread[i], NULL);
  world_end(&shared);
}
