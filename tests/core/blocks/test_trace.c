/* What the trace and its watcher are told. */
#include <stdbool.h>

#include "core/base/types.h"
#include "world.h"

static world w;
static esper_stream r, s;

static void begin(void)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                         .devices = 2,
                         .completion = SIM_WHEN_TOLD,
                         .capacity = 64 * MIB};
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  s = w.stream[1];
}

static esper_trace_entry *entries;
static size_t count;

static void end(void)
{
  world_end(&w);
  free(entries);
  entries = NULL;
}

static void copy(int device)
{
  free(entries);
  CHECK_OK(esper_trace_copy(w.core, device, &entries, &count));
}

static void check_entry(size_t i, esper_action action, const void *address, size_t size,
                        esper_stream stream)
{
  CHECK(i < count);
  CHECK_EQ(entries[i].action, action);
  CHECK(entries[i].address == (uintptr_t)address);
  CHECK_EQ(entries[i].size, size);
  CHECK(entries[i].stream == stream.handle);
  CHECK_EQ(entries[i].device, stream.device);
  CHECK(entries[i].time_us > 1500000000000000); /* since 1970 */
  CHECK(i == 0 || entries[i].time_us >= entries[i - 1].time_us);
}

TEST(everything_that_happens_is_told_in_order)
{
  begin();
  CHECK(!esper_trace_is_on(w.core));
  CHECK_OK(esper_trace_start(w.core, 100));
  CHECK(esper_trace_is_on(w.core));
  void *p = world_malloc(&w, 11 * MIB - 5, r), *q;
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  sim_run_all(w.s);
  esper_retire(w.core, 0);
  CHECK_STATUS(esper_malloc(w.core, 100 * MIB - 5, r, &q), ESPER_OUT_OF_MEMORY);
  copy(0);
  CHECK_EQ(count, 6);
  check_entry(0, ESPER_TRACE_SEGMENT_ALLOC, p, 12 * MIB, r);
  check_entry(1, ESPER_TRACE_ALLOC, p, 11 * MIB - 5, r);
  check_entry(2, ESPER_TRACE_FREE_REQUESTED, p, 11 * MIB - 5, r);
  check_entry(3, ESPER_TRACE_FREE_COMPLETED, p, 11 * MIB - 5, r);
  check_entry(4, ESPER_TRACE_SEGMENT_FREE, p, 12 * MIB, r);
  check_entry(5, ESPER_TRACE_OOM, (void *)(64 * MIB), 100 * MIB, r);
  copy(1);
  CHECK_EQ(count, 0);
  esper_trace_clear(w.core);
  copy(0);
  CHECK_EQ(count, 0);
  esper_trace_entry *none;
  CHECK_STATUS(esper_trace_copy(w.core, 7, &none, &count), ESPER_INVALID);
  CHECK(!none && count == 0);
  end();
}

TEST(the_ring_keeps_the_last_entries)
{
  begin();
  void *p = world_malloc(&w, 512, r);
  world_malloc(&w, 512, r);
  for (size_t most = 1; most < 5000; most = most * 3 + 1) {
    CHECK_OK(esper_trace_start(w.core, most));
    for (int i = 0; i < 2600; i++) {
      world_free(&w, p);
      CHECK(world_malloc(&w, 512 - (size_t)i % 100, r) == p);
    }
    copy(0);
    size_t all = 3 * 2600; /* free_requested, free_completed, alloc */
    CHECK_EQ(count, most < all ? most : all);
    check_entry(count - 1, ESPER_TRACE_ALLOC, p, 512 - 2599 % 100, r);
    for (size_t i = 3; i < count; i++)
      CHECK_EQ(entries[i].action, entries[i - 3].action);
  }
  CHECK_OK(esper_trace_start(w.core, 0));
  CHECK(!esper_trace_is_on(w.core));
  copy(0);
  CHECK_EQ(count, 0);
  /* "Everything" takes no memory up front. */
  CHECK_OK(esper_trace_start(w.core, SIZE_MAX));
  CHECK_OK(esper_trace_start(w.core, 0));
  end();
}

static struct {
  esper_trace_entry last;
  int count;
} watched;

static void watch(void *context, const esper_trace_entry *entry)
{
  CHECK(context == &watched);
  watched.last = *entry;
  watched.count++;
}

TEST(a_watcher_is_told_with_and_without_a_trace)
{
  begin();
  esper_trace_watch(w.core, watch, &watched);
  void *p = world_malloc(&w, 3000, r);
  CHECK_EQ(watched.count, 2); /* segment_alloc, alloc */
  CHECK_EQ(watched.last.action, ESPER_TRACE_ALLOC);
  CHECK(watched.last.address == (uintptr_t)p && watched.last.size == 3000);
  copy(0);
  CHECK_EQ(count, 0);
  CHECK_OK(esper_trace_start(w.core, 10));
  world_free(&w, p);
  copy(0);
  CHECK_EQ(count, 2); /* free_requested, free_completed */
  CHECK_EQ(watched.count, 4);
  CHECK(!memcmp(&watched.last, &entries[1], sizeof watched.last));
  CHECK_OK(esper_trace_start(w.core, 0)); /* stops the trace alone */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(watched.last.action, ESPER_TRACE_SEGMENT_FREE);
  esper_trace_watch(w.core, NULL, NULL);
  world_malloc(&w, 3000, r);
  CHECK_EQ(watched.count, 5);
  end();
}

TEST(entries_name_their_pool)
{
  begin();
  CHECK_OK(esper_trace_start(w.core, 100));
  esper_pool *pool;
  void *p;
  CHECK_OK(esper_pool_create(w.core, 0, 7, 9, &pool));
  CHECK_OK(esper_malloc_from(w.core, pool, 12 * MIB, r, &p));
  sim_owner_begin(w.s, p, 12 * MIB, 0, r.handle);
  world_malloc(&w, 512, r);
  world_free(&w, p);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 9));
  CHECK_OK(esper_pool_empty(w.core, 0, 7, 9));
  copy(0);
  CHECK_EQ(count, 7);
  for (size_t i = 0; i < count; i++) {
    bool of_pool = i != 2 && i != 3; /* the small block and its segment */
    CHECK_EQ(entries[i].pool[0], of_pool ? 7 : 0);
    CHECK_EQ(entries[i].pool[1], of_pool ? 9 : 0);
  }
  CHECK_EQ(entries[6].action, ESPER_TRACE_SEGMENT_FREE);
  end();
}
