/* Mapped segments: where pages are mapped, which are lent, and which go back. */
#include <time.h>

#include "core/api/testing.h"
#include "core/base/types.h"
#include "world.h"
#include "core/blocks/block.h"
#include "core/base/core.h"

static world w;
static esper_stream r, s;

/* A device that can map pages and has `mib` MiB. */
static void begin_with(size_t mib, const esper_config *config)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                         .completion = SIM_WHEN_TOLD,
                         .virtual_memory = 1,
                         .capacity = mib * MIB};
  esper_config pages_of_20_mib = {.large_segment_size = 20 * MIB,
                                  .segments = ESPER_SEGMENTS_MAPPED};
  world_begin_with(&w, &options, config ? config : &pages_of_20_mib);
  r = w.stream[0];
  s = w.stream[1];
}

static void begin(void)
{
  begin_with(256, NULL);
}

static void end(void)
{
  world_end(&w);
}

static int64_t reserved(void)
{
  return world_stats(&w, 0).reserved_bytes[ESPER_ALL].current / (int64_t)MIB;
}

static uint64_t calls(sim_call call)
{
  return sim_calls(w.s, call);
}

static void *get(size_t mib, esper_stream stream)
{
  return world_malloc(&w, mib * MIB, stream);
}

/* The same, with a kernel of the stream on it. */
static void *used(size_t mib, esper_stream stream)
{
  void *p = get(mib, stream);
  world_kernel(&w, stream, p);
  return p;
}

/* `count` blocks one after the other, every other one of which is freed, and
 * nothing is owed. */
enum { MOST = 32 };
static void *pieces[MOST];
static void comb(size_t mib, int count, esper_stream stream)
{
  for (int i = 0; i < count; i++)
    pieces[i] = used(mib, stream);
  world_run(&w, stream);
  for (int i = 0; i < count; i += 2)
    world_free(&w, pieces[i]);
}

static segment_t *first_segment(void)
{
  return w.core->devices[0].first_segment;
}

/* ---- growth ---------------------------------------------------------------- */

TEST(a_heap_grows_by_what_is_missing)
{
  begin();
  void *p = get(5, r);
  CHECK_EQ(reserved(), 6);
  void *q = get(3, r);
  CHECK_EQ((char *)q - (char *)p, 5 * MIB);
  CHECK_EQ(reserved(), 8);
  world_free(&w, q);
  CHECK(get(40, r) == q); /* the free memory at the end is a part of it */
  CHECK_EQ(reserved(), 46);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 1);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 0);
  CHECK_EQ(calls(SIM_CALL_range_reserve), 1);
  end();
}

TEST(small_and_large_blocks_have_segments_of_their_own)
{
  begin();
  world_malloc(&w, 512, r);
  get(2, r);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_SMALL].current, 2 * MIB);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_LARGE].current, 2 * MIB);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_SMALL].current, 1);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_LARGE].current, 1);
  CHECK_EQ(calls(SIM_CALL_range_reserve), 2);
  end();
}

TEST(a_large_request_takes_few_pages)
{
  esper_config defaults = {.segments = ESPER_SEGMENTS_AUTO};
  begin_with(1024, &defaults);
  get(512, r);
  CHECK_EQ(calls(SIM_CALL_page_create), 128);
  CHECK_EQ(reserved(), 512);
  end();
}

/* What is beside a block on its last page is small then. */
TEST(a_small_heap_has_small_pages)
{
  esper_config defaults = {.segments = ESPER_SEGMENTS_AUTO};
  begin_with(1024, &defaults);
  get(4, r); /* the first page of large blocks is what a program starts with */
  CHECK_EQ(calls(SIM_CALL_page_create), 1);
  get(20, r);
  CHECK_EQ(calls(SIM_CALL_page_create), 11);
  end();
}

TEST(the_rest_of_a_block_is_free_however_small)
{
  begin();
  world_malloc(&w, 5 * MIB + 512, r);
  CHECK_EQ(world_stats(&w, 0).allocated_bytes[ESPER_ALL].current, 5 * MIB + 512);
  world_free(&w, world_malloc(&w, 3 * MIB, r));
  void *p = world_malloc(&w, 3 * MIB - 1024, r);
  CHECK_EQ(world_size(&w, p), 3 * MIB - 1024);
  end();
}

TEST(pages_are_as_large_as_large_segments)
{
  esper_config config = {.large_segment_size = 4 * MIB};
  begin_with(256, &config);
  get(40, r);
  CHECK_EQ(calls(SIM_CALL_page_create), 10);
  end();
}

/* Options that mean nothing for mapped segments keep their meaning. */
TEST(what_concerns_classic_segments_asks_for_them)
{
  esper_config given[] = {{.max_split_size = 64 * MIB},
                          {.garbage_collection_threshold = 0.8},
                          {.max_non_split_rounding = 40 * MIB}, /* without the first, nothing */
                          {.segments = ESPER_SEGMENTS_AUTO},
                          {.large_segment_size = 20 * MIB}};
  for (int i = 0; i < 5; i++)
    for (int asked = 0; asked < 2; asked++) {
      if (asked)
        given[i].segments = ESPER_SEGMENTS_MAPPED;
      begin_with(256, &given[i]);
      get(5, r);
      CHECK_EQ(calls(SIM_CALL_page_create) > 0, asked || i >= 2);
      end();
    }
}

static uint64_t state = 1;

static size_t draw(size_t below)
{
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (size_t)(state >> 33) % below;
}

/* docs/design.md, Sizes: what of a block nobody asked for, of 1 byte to 64 MiB. */
TEST(no_block_wastes_more_than_its_share)
{
  for (int mapped = 0; mapped < 2; mapped++) {
    esper_config config = {.segments = mapped ? ESPER_SEGMENTS_MAPPED : ESPER_SEGMENTS_CLASSIC};
    begin_with(16 * 1024, &config);
    size_t most = 0;
    for (int i = 0; i < 3000; i++) {
      size_t size = 1 + draw((size_t)1 << (4 + draw(23)));
      world_free(&w, world_malloc(&w, size + draw(512 * KIB), r)); /* for the rest to stay in */
      void *p = world_malloc(&w, size, r);
      size_t rest = world_size(&w, p) - size;
      CHECK(rest < 512 || (!mapped && size > MIB - 512 && rest < 256 * KIB + 512));
      if (rest > most)
        most = rest;
      world_free(&w, p);
      if (i % 100 == 99)
        CHECK_OK(esper_empty_cache(w.core, 0, NULL));
    }
    CHECK(mapped ? most == 511 || most == 510 || most == 509 : most > 128 * KIB);
    end();
  }
}

TEST(classic_segments_are_to_be_had)
{
  esper_config config = {.segments = ESPER_SEGMENTS_CLASSIC};
  begin_with(256, &config);
  void *p = get(5, r);
  CHECK_EQ(reserved(), 20);
  CHECK_EQ(calls(SIM_CALL_range_reserve) + calls(SIM_CALL_page_create), 0);
  config.segments = ESPER_SEGMENTS_MAPPED; /* from now on */
  CHECK_OK(esper_configure(w.core, &config));
  get(22, r);
  CHECK_EQ(reserved(), 42);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  world_free(&w, p);
  CHECK(get(16, r) == p);
  config.segments = (esper_segments)3;
  CHECK_STATUS(esper_configure(w.core, &config), ESPER_INVALID);
  end();
}

/* A program with a bit of everything; how often each function of the driver was
 * called. */
static int any_stream(void *context, void *handle)
{
  (void)context, (void)handle;
  return 1;
}

/* Whoever creates a pool may have its segments registered elsewhere, which cannot follow
 * pages; a pool that a capture makes has them. */
TEST(created_pools_have_classic_segments_unless_mapped_ones_are_asked_for)
{
  for (int asked = 0; asked < 2; asked++) {
    esper_config config = {.segments = asked ? ESPER_SEGMENTS_MAPPED : ESPER_SEGMENTS_AUTO};
    begin_with(256, &config);
    esper_pool *pool, *again;
    void *p, *q;
    CHECK_OK(esper_pool_create(w.core, 0, 0, 1, &pool));
    CHECK_OK(esper_malloc_from(w.core, pool, 5 * MIB, r, &p));
    sim_owner_begin(w.s, p, 5 * MIB, 0, r.handle);
    CHECK_EQ(reserved(), asked ? 6 : 20);
    CHECK_OK(esper_pool_begin(w.core, 0, 2, 0, any_stream, NULL));
    CHECK_OK(esper_pool_create(w.core, 0, 2, 0, &again)); /* there already */
    CHECK_OK(esper_malloc_from(w.core, again, 5 * MIB, r, &q));
    sim_owner_begin(w.s, q, 5 * MIB, 0, r.handle);
    CHECK_OK(esper_pool_end(w.core, 0, 2, 0, NULL));
    CHECK_EQ(reserved(), asked ? 12 : 26);
    esper_snapshot snapshot;
    CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
    CHECK_EQ(snapshot.segment_count, 2);
    for (int i = 0; i < 2; i++) { /* by birth, which is all that orders them the same
                                     in every process */
      const esper_segment_entry *segment = &snapshot.segments[i];
      CHECK_EQ(segment->mapped, asked || segment->pool[0] == 2);
      CHECK_EQ(segment->birth < snapshot.segments[!i].birth, segment->pool[0] == 0);
    }
    esper_snapshot_free(&snapshot);
    end();
  }
}

static void count_calls(int virtual_memory, esper_segments kind, uint64_t *counts)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                         .completion = SIM_WHEN_TOLD,
                         .virtual_memory = virtual_memory,
                         .capacity = 256 * MIB};
  esper_config config = {.segments = kind};
  world_begin_with(&w, &options, &config);
  r = w.stream[0];
  s = w.stream[1];
  void *p = used(30, r), *q = used(3, s), *small = world_malloc(&w, 700, r), *none;
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  p = used(24, r);
  world_free(&w, q);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.5));
  CHECK_STATUS(esper_malloc(w.core, 200 * MIB, s, &none), ESPER_OUT_OF_MEMORY);
  sim_capture_begin(w.s, 0, r.handle);
  world_free(&w, used(12, r));
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  sim_graph_destroy(w.s, graph);
  esper_pool *pool;
  CHECK_OK(esper_pool_create(w.core, 0, 3, 1, &pool));
  CHECK_OK(esper_malloc_from(w.core, pool, 5 * MIB, r, &q));
  CHECK_OK(esper_free(w.core, q));
  CHECK_OK(esper_pool_release(w.core, 0, 3, 1));
  world_free(&w, p);
  world_free(&w, small);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  world_check(&w);
  for (int call = 0; call < SIM_CALL_COUNT; call++)
    counts[call] = calls((sim_call)call);
  world_end(&w);
}

/* A classic program has nothing to do with virtual memory, whatever the device can. */
TEST(classic_segments_ask_the_driver_for_nothing_more)
{
  uint64_t without[SIM_CALL_COUNT], with[SIM_CALL_COUNT], asked[SIM_CALL_COUNT];
  count_calls(0, ESPER_SEGMENTS_CLASSIC, without);
  count_calls(1, ESPER_SEGMENTS_CLASSIC, with);
  for (int call = 0; call < SIM_CALL_COUNT; call++)
    CHECK_EQ(with[call], without[call]);
  CHECK_EQ(with[SIM_CALL_page_granularity], 0);
  CHECK(with[SIM_CALL_memory_alloc] > 3);
  count_calls(0, ESPER_SEGMENTS_MAPPED, asked); /* one question, and the answer is no */
  CHECK_EQ(asked[SIM_CALL_page_granularity], 1);
  asked[SIM_CALL_page_granularity] = 0;
  for (int call = 0; call < SIM_CALL_COUNT; call++)
    CHECK_EQ(asked[call], without[call]);
}

/* ... and a device that does not say is asked again. */
TEST(where_the_granule_is_not_known_segments_are_classic)
{
  begin();
  sim_fail_call(w.s, SIM_CALL_page_granularity, 1, ESPER_DEVICE_ERROR);
  get(5, r);
  CHECK_EQ(reserved(), 20);
  get(60, r);
  CHECK_EQ(reserved(), 80);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  CHECK_EQ(calls(SIM_CALL_page_granularity), 2);
  end();
}

TEST(where_pages_cannot_be_mapped_segments_are_classic)
{
  esper_config config = {.segments = ESPER_SEGMENTS_MAPPED};
  sim_options options = {.oracle = SIM_ORACLE_KNOWN};
  world_begin_with(&w, &options, &config);
  r = w.stream[0];
  get(5, r);
  CHECK_EQ(reserved(), 20);
  CHECK_EQ(calls(SIM_CALL_range_reserve), 0);
  end();
}

TEST(without_addresses_segments_are_classic)
{
  begin();
  sim_fail_call(w.s, SIM_CALL_range_reserve, 1, ESPER_OUT_OF_MEMORY);
  get(5, r);
  CHECK_EQ(reserved(), 20);
  get(60, r);
  CHECK_EQ(reserved(), 80);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  end();
}

static void host_memory_runs_out(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)device, (void)object;
  check_limit_malloc(call == SIM_CALL_range_reserve ? 0 : -1);
}

/* No page table: the addresses go back. */
TEST(without_host_memory_segments_are_classic)
{
  begin();
  void *p = world_malloc(&w, 512, r); /* what comes next has but its table to get */
  CHECK_EQ(reserved(), 2);
  sim_after_call(w.s, SIM_CALL_range_reserve, host_memory_runs_out, NULL);
  sim_before_call(w.s, SIM_CALL_range_free, host_memory_runs_out, NULL);
  get(5, r);
  CHECK_EQ(reserved(), 2 + 20);
  sim_alive alive;
  sim_count_alive(w.s, 0, &alive);
  CHECK_EQ(alive.ranges, 1);
  sim_after_call(w.s, SIM_CALL_range_reserve, NULL, NULL);
  get(60, r);
  CHECK_EQ(reserved(), 22 + 60);
  sim_count_alive(w.s, 0, &alive);
  CHECK_EQ(alive.ranges, 2);
  world_free(&w, p);
  end();
}

TEST(a_segment_without_room_is_followed_by_another)
{
  begin();
  get(200, r);
  sim_set_capacity(w.s, 0, 1024 * MIB);
  get(500, r);
  CHECK_EQ(calls(SIM_CALL_range_reserve), 2);
  CHECK_EQ(reserved(), 700);
  end();
}

TEST(max_split_size_is_no_matter_of_mapped_segments)
{
  esper_config config = {.segments = ESPER_SEGMENTS_MAPPED, .max_split_size = 20 * MIB};
  begin_with(256, &config);
  world_free(&w, get(64, r)); /* oversize, and would be left alone */
  get(2, r);
  get(30, r);
  CHECK_EQ(reserved(), 64);
  end();
}

TEST(the_memory_fraction_limits_pages)
{
  begin();
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.25));
  void *p = get(60, r), *q;
  CHECK_STATUS(esper_malloc(w.core, 5 * MIB, r, &q), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(calls(SIM_CALL_page_create), 3);
  get(4, r);
  CHECK_EQ(reserved(), 64);
  world_free(&w, p);
  get(30, s);
  CHECK_EQ(reserved(), 64);
  end();
}

TEST(what_was_mapped_before_memory_ran_out_goes_back)
{
  begin();
  void *p;
  get(200, r);
  CHECK_STATUS(esper_malloc(w.core, 100 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK(calls(SIM_CALL_page_map) > 10); /* some of it was there */
  CHECK_EQ(reserved(), 200);
  world_check(&w);
  get(56, r);
  CHECK_EQ(reserved(), 256);
  end();
}

/* Pages of what there is, made one by one until there is none, would leave nothing to
 * other processes meanwhile. */
TEST(what_the_device_does_not_have_is_not_tried)
{
  esper_config defaults = {.segments = ESPER_SEGMENTS_AUTO};
  begin_with(256, &defaults);
  void *p, *q = get(100, r);
  uint64_t created = calls(SIM_CALL_page_create);
  CHECK_STATUS(esper_malloc(w.core, 200 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(calls(SIM_CALL_page_map), created);       /* of those there were */
  CHECK(calls(SIM_CALL_page_create) <= created + 3); /* all of it as one, in each try */
  CHECK_EQ(reserved(), 100);
  world_free(&w, q);
  get(200, r); /* the 100 are a part of it */
  CHECK_EQ(reserved(), 200);
  world_check(&w);
  end();
}

/* The system may keep caches in what is not free, and give them up when it is asked. */
TEST(a_device_may_have_more_than_it_says)
{
  esper_config defaults = {.segments = ESPER_SEGMENTS_AUTO};
  begin_with(256, &defaults);
  sim_set_caches(w.s, 0, 216 * MIB);
  get(200, r);
  CHECK_EQ(reserved(), 200);
  CHECK_EQ(calls(SIM_CALL_page_release), 1); /* of the one that asked */
  world_check(&w);
  end();
}

/* A page that asked and does not go back is not forgotten. */
TEST(a_page_that_only_asked_may_stay)
{
  esper_config defaults = {.segments = ESPER_SEGMENTS_AUTO};
  begin_with(256, &defaults);
  void *p;
  sim_set_caches(w.s, 0, 216 * MIB);
  sim_fail_calls_from(w.s, SIM_CALL_page_release, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc(w.core, 100 * MIB, r, &p), ESPER_DEVICE_ERROR);
  CHECK_EQ(reserved(), 0);
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 100 * MIB);
  world_check(&w);
  sim_fail_call(w.s, SIM_CALL_page_release, 0, ESPER_OK);
  get(200, r);
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 0);
  world_check(&w);
  end();
}

/* A device that has failed says so, as it does where a classic segment is asked for. */
TEST(a_device_that_cannot_say_what_it_has_is_not_asked_for_more)
{
  esper_config defaults = {.segments = ESPER_SEGMENTS_AUTO};
  begin_with(256, &defaults);
  void *p;
  get(2, r);
  sim_fail_call(w.s, SIM_CALL_memory_info, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc(w.core, 100 * MIB, r, &p), ESPER_DEVICE_ERROR);
  CHECK_EQ(reserved(), 2);
  world_check(&w);
  get(100, r);
  end();
}

/* ... as far as it will. */
TEST(what_was_mapped_and_does_not_go_back_is_free)
{
  begin();
  void *p;
  get(200, r);
  sim_fail_calls_from(w.s, SIM_CALL_page_release, 2, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc(w.core, 100 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(reserved(), 220);
  world_check(&w);
  CHECK_EQ(get(56, r) != NULL, 1);
  CHECK_EQ(reserved(), 256);
  sim_fail_call(w.s, SIM_CALL_page_release, 0, ESPER_OK);
  end();
}

/* An orphaned page, which can be neither mapped nor released, is not forgotten. */
TEST(a_loose_page_is_tried_again)
{
  begin();
  void *p;
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.25));
  sim_fail_call(w.s, SIM_CALL_page_map, 1, ESPER_DEVICE_ERROR);
  sim_fail_calls_from(w.s, SIM_CALL_page_release, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc(w.core, 10 * MIB, r, &p), ESPER_DEVICE_ERROR);
  CHECK_EQ(reserved(), 0);
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 10 * MIB);
  world_check(&w); /* the orphaned page counts */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 10 * MIB);
  CHECK_STATUS(esper_malloc(w.core, 56 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
  world_check(&w);
  sim_fail_call(w.s, SIM_CALL_page_release, 0, ESPER_OK);
  get(56, r); /* of the fraction's 64 */
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 0);
  world_check(&w);
  end();
}

TEST(loose_pages_go_back_when_the_cache_is_emptied_or_the_core_ends)
{
  void *p;
  for (int i = 0; i < 2; i++) {
    begin();
    sim_fail_call(w.s, SIM_CALL_page_map, 1, ESPER_DEVICE_ERROR);
    sim_fail_call(w.s, SIM_CALL_page_release, 1, ESPER_DEVICE_ERROR);
    CHECK_STATUS(esper_malloc(w.core, 10 * MIB, r, &p), ESPER_DEVICE_ERROR);
    if (i == 0) {
      CHECK_OK(esper_empty_cache(w.core, 0, NULL));
      CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 0);
    }
    world_check(&w);
    end();
  }
}

/* Another thread wants memory of the same heap while pages are being mapped. */
static void *meanwhile;
static void get_30_mib(void *context)
{
  (void)context;
  world_check(&w);
  meanwhile = get(30, r);
}
static void get_meanwhile(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)call, (void)device, (void)object;
  sim_before_call(w.s, SIM_CALL_page_create, NULL, NULL);
  check_on_another_thread(get_30_mib, NULL);
}

TEST(two_threads_may_grow_one_heap_at_once)
{
  begin();
  world_free(&w, get(10, r));
  sim_before_call(w.s, SIM_CALL_page_create, get_meanwhile, NULL);
  char *p = get(40, r);
  CHECK((char *)meanwhile >= p + 40 * MIB);
  CHECK_EQ(reserved(), 70);
  world_check(&w);
  end();
}

/* ---- pages go back --------------------------------------------------------- */

TEST(empty_cache_unmaps_the_pages_between)
{
  begin();
  comb(20, 5, r);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 1);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 40);
  esper_stats stats = world_stats(&w, 0);
  CHECK_EQ(stats.segment[ESPER_ALL].current, 2); /* stretches */
  CHECK_EQ(stats.reserved_bytes[ESPER_LARGE].freed, 60 * MIB);
  void *p = pieces[2];
  CHECK_STATUS(esper_free(w.core, p), ESPER_INVALID); /* a hole */
  size_t marked;
  const void *inside = (char *)p + 512;
  CHECK_OK(esper_record_use(w.core, &inside, 1, s, 0, &marked));
  CHECK_EQ(marked, 0);
  esper_block_info info;
  CHECK_STATUS(esper_find_block(w.core, inside, &info), ESPER_INVALID);
  world_free(&w, pieces[1]);
  world_free(&w, pieces[3]);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  sim_alive alive;
  sim_count_alive(w.s, 0, &alive);
  CHECK_EQ(alive.pages + alive.mappings + alive.ranges, 0);
  end();
}

TEST(snapshots_show_stretches)
{
  begin();
  comb(20, 4, r);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  esper_snapshot snapshot;
  CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
  CHECK_EQ(snapshot.segment_count, 2);
  for (int i = 0; i < 2; i++) {
    const esper_segment_entry *entry = &snapshot.segments[i];
    CHECK(entry->mapped && entry->large);
    CHECK(entry->address == (uintptr_t)pieces[2 * i + 1]);
    CHECK_EQ(entry->size, 20 * MIB);
    CHECK_EQ(entry->block_count, 1);
  }
  esper_snapshot_free(&snapshot);
  end();
}

TEST(the_base_of_a_block_is_its_stretch)
{
  begin();
  comb(20, 4, r);
  esper_block_info info;
  void *base;
  size_t size;
  CHECK_OK(esper_find_block(w.core, pieces[3], &info));
  CHECK(info.mapped);
  CHECK_OK(esper_find_base(w.core, (char *)pieces[3] + 5, &base, &size));
  CHECK(base == pieces[0]);
  CHECK_EQ(size, 80 * MIB);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_OK(esper_find_base(w.core, pieces[3], &base, &size));
  CHECK(base == pieces[3]);
  CHECK_EQ(size, 20 * MIB);
  CHECK_STATUS(esper_find_base(w.core, pieces[2], &base, &size), ESPER_INVALID);
  end();
}

TEST(a_part_of_a_page_keeps_it)
{
  begin();
  void *p = get(20, r), *q = get(12, r), *last = get(10, r);
  world_free(&w, q); /* the page from 20 MiB on has the last one's first bytes? */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  world_check(&w);
  CHECK_EQ(reserved(), 30);
  world_free(&w, p);
  world_free(&w, last);
  end();
}

TEST(holes_are_filled_again)
{
  begin();
  comb(20, 5, r);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(get(20, r) == pieces[2] || world_size(&w, pieces[1]));
  CHECK_EQ(reserved(), 60);
  CHECK_EQ(calls(SIM_CALL_range_reserve), 1);
  end();
}

/* Free memory on both sides of a hole: only the hole is filled. */
TEST(a_hole_between_free_blocks_is_filled_alone)
{
  begin();
  void *a = get(20, r), *b = get(20, r), *c = get(20, r), *stays = get(20, r);
  world_free(&w, b);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 60);
  world_free(&w, a);
  world_free(&w, c);
  CHECK(get(60, r) == a);
  CHECK_EQ(reserved(), 80);
  world_free(&w, stays);
  end();
}

TEST(a_page_that_cannot_be_released_stays)
{
  begin();
  void *p = get(40, r);
  world_free(&w, p);
  sim_fail_calls_from(w.s, SIM_CALL_page_release, 2, ESPER_DEVICE_ERROR);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 20);
  world_check(&w);
  sim_fail_call(w.s, SIM_CALL_page_release, 0, ESPER_OK);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  end();
}

/* Its handle is gone by then, so it serves where it is, and is not lent. */
TEST(a_page_that_cannot_be_unmapped_serves_on)
{
  begin();
  void *p = get(20, r), *q = get(20, r);
  world_free(&w, p);
  sim_fail_call(w.s, SIM_CALL_page_unmap, 1, ESPER_DEVICE_ERROR);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 40);
  get(30, r);
  CHECK_EQ(reserved(), 70);
  CHECK(get(20, r) == p);
  world_free(&w, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 50);
  world_free(&w, q);
  end();
}

/* ---- lending --------------------------------------------------------------- */

TEST(scattered_pages_serve_a_large_request)
{
  begin();
  comb(20, 8, r);
  CHECK_EQ(reserved(), 160);
  void *p = used(80, r);
  CHECK_EQ(reserved(), 160);
  CHECK_EQ(calls(SIM_CALL_page_create), 8);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 4);
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].peak, 160 * MIB);
  CHECK_STATUS(esper_free(w.core, pieces[0]), ESPER_INVALID); /* a hole */
  world_check(&w);
  world_free(&w, p);
  end();
}

TEST(the_trace_shows_pages_that_move)
{
  begin();
  comb(20, 4, r);
  CHECK_OK(esper_trace_start(w.core, 100));
  void *p = get(40, r);
  esper_trace_entry *entries;
  size_t count, unmapped = 0, mapped = 0;
  CHECK_OK(esper_trace_copy(w.core, 0, &entries, &count));
  for (size_t i = 0; i < count; i++) {
    if (entries[i].action == ESPER_TRACE_SEGMENT_UNMAP) {
      CHECK_EQ(mapped, 0); /* so that sums never pass the peak */
      CHECK_EQ(entries[i].size, 20 * MIB);
      unmapped++;
    } else if (entries[i].action == ESPER_TRACE_SEGMENT_MAP) {
      CHECK(entries[i].address == (uintptr_t)p);
      CHECK_EQ(entries[i].size, 40 * MIB);
      mapped++;
    }
  }
  CHECK_EQ(unmapped, 2);
  CHECK_EQ(mapped, 1);
  free(entries);
  end();
}

/* A heap's own pages serve at once, whatever its stream is still doing with them. */
TEST(pages_of_the_own_stream_are_lent_while_it_is_at_work)
{
  begin();
  for (int i = 0; i < 4; i++)
    pieces[i] = used(20, r);
  world_free(&w, pieces[0]);
  world_free(&w, pieces[2]);
  void *p = used(40, r);
  CHECK_EQ(reserved(), 80);
  CHECK_EQ(calls(SIM_CALL_page_unmap), 0);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_STATUS(esper_free(w.core, pieces[0]), ESPER_INVALID);
  CHECK(sim_pending(w.s, 0, r.handle) >= 5);
  world_check(&w);
  /* The old mappings go when the stream is done with them. */
  get(8, r);
  CHECK_EQ(calls(SIM_CALL_page_unmap), 0);
  world_run(&w, r);
  get(8, r);
  CHECK_EQ(calls(SIM_CALL_page_unmap), 2);
  world_free(&w, p);
  end();
}

TEST(pages_go_back_although_they_moved)
{
  begin();
  for (int i = 0; i < 4; i++)
    pieces[i] = used(20, r);
  world_free(&w, pieces[0]);
  world_free(&w, pieces[2]);
  world_free(&w, used(40, r));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 40);
  world_check(&w); /* the device agrees */
  sim_alive alive;
  sim_count_alive(w.s, 0, &alive);
  CHECK_EQ(alive.mappings, 2);
  end();
}

TEST(a_stale_page_that_cannot_be_unmapped_is_tried_again)
{
  begin();
  for (int i = 0; i < 4; i++)
    pieces[i] = used(20, r);
  void *p = used(40, r);
  for (int i = 0; i < 4; i++)
    world_free(&w, pieces[i]);
  used(100, r);
  CHECK_EQ(reserved(), 140);
  world_free(&w, p);
  sim_fail_calls_from(w.s, SIM_CALL_page_unmap, 3, ESPER_DEVICE_ERROR);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  world_check(&w);
  CHECK_EQ(reserved(), 140);
  sim_fail_call(w.s, SIM_CALL_page_unmap, 0, ESPER_OK);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 100);
  end();
}

TEST(other_streams_lend_pages_that_have_completed)
{
  begin();
  comb(20, 8, s);
  get(10, r);
  CHECK_EQ(reserved(), 170); /* nobody knows yet that they have */
  world_run(&w, s);
  get(70, r);
  CHECK_EQ(reserved(), 170);
  end();
}

TEST(what_is_missing_besides_is_new)
{
  begin();
  comb(20, 4, r);
  get(70, r);
  CHECK_EQ(reserved(), 110);
  end();
}

TEST(pages_that_are_still_read_are_not_lent)
{
  begin();
  comb(20, 4, r);
  void *p = get(20, r);
  world_read_on(&w, s, p, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  world_run(&w, r);
  get(30, r);
  CHECK_EQ(reserved(), 90); /* one page of 20 MiB could be had */
  end();
}

/* Before a request fails the host waits, and then they are. */
TEST(pages_are_lent_before_memory_runs_out)
{
  begin_with(80, NULL);
  for (int i = 0; i < 4; i++)
    pieces[i] = used(20, s);
  world_free(&w, pieces[0]);
  world_free(&w, pieces[2]);
  get(40, r);
  CHECK_EQ(reserved(), 80);
  end();
}

/* Seven blocks of a page each, every other one free, the last one among them; and pages
 * have moved often. */
static void comb_after_many_moves(void)
{
  comb(20, 7, r);
  core_set_pages_moved(w.core, 256);
}

/* Where there is slack, this takes 2 MiB of it. */
static void a_page_moves_instead(void)
{
  uint64_t moved = world_counters(&w, 0).pages_moved;
  get(22, r);
  CHECK_EQ(reserved(), 140);
  CHECK_EQ(world_counters(&w, 0).pages_moved, moved + 1);
}

TEST(with_a_little_slack_nothing_moves)
{
  begin();
  comb_after_many_moves();
  void *last = get(22, r);
  CHECK_EQ(reserved(), 142);
  world_free(&w, last);
  last = get(24, r);
  CHECK_EQ(reserved(), 144);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 256);
  world_free(&w, last);
  get(26, r); /* 6 MiB would be more than a 25th of 140 */
  CHECK_EQ(world_counters(&w, 0).pages_moved, 257);
  CHECK_EQ(reserved(), 144);
  end();
}

TEST(what_takes_more_than_the_slack_moves)
{
  begin();
  comb_after_many_moves();
  get(43, r);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 258);
  CHECK_EQ(reserved(), 140);
  end();
}

TEST(slack_comes_back_with_memory)
{
  begin();
  comb_after_many_moves();
  get(22, r);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  end();
}

/* As after a phase that needed more, and gave nothing back. */
TEST(what_is_reserved_beyond_the_peak_is_slack_enough)
{
  begin();
  comb_after_many_moves();
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  a_page_moves_instead();
  end();
}

TEST(few_moves_need_no_slack)
{
  begin();
  comb_after_many_moves();
  core_set_pages_moved(w.core, 255);
  a_page_moves_instead();
  end();
}

TEST(pages_move_where_the_memory_fraction_leaves_no_room)
{
  begin();
  comb_after_many_moves();
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 140.0 / 256));
  a_page_moves_instead();
  end();
}

TEST(pages_move_where_the_device_has_no_room)
{
  begin_with(140, NULL);
  comb_after_many_moves();
  a_page_moves_instead();
  CHECK_EQ(world_stats(&w, 0).num_alloc_retries, 0);
  end();
}

TEST(pages_move_where_requests_are_rejected)
{
  esper_config config = {.large_segment_size = 20 * MIB,
                         .rejection_share = 141.0 / 256,
                         .segments = ESPER_SEGMENTS_MAPPED};
  begin_with(256, &config);
  comb_after_many_moves();
  a_page_moves_instead();
  CHECK_EQ(world_stats(&w, 0).num_oom_rejections, 0);
  end();
}

/* A device that has no pages for slack is not asked for more until as many have moved again;
 * and that it had none does not say that the heap cannot grow. */
TEST(a_device_without_room_is_asked_once)
{
  begin_with(140, NULL);
  comb_after_many_moves();
  world_free(&w, get(22, r));
  uint64_t asked = calls(SIM_CALL_page_create);
  CHECK_EQ(w.core->devices[0].refused, 0);
  world_free(&w, get(42, r));
  CHECK_EQ(world_counters(&w, 0).pages_moved, 258);
  CHECK_EQ(calls(SIM_CALL_page_create), asked);
  sim_set_capacity(w.s, 0, 256 * MIB);
  core_set_pages_moved(w.core, 511);
  world_free(&w, get(62, r)); /* the 512th moves */
  CHECK_EQ(reserved(), 140);
  get(82, r);
  CHECK_EQ(reserved(), 142);
  end();
}

/* Nor is one on which a request had to wait for memory. */
TEST(after_a_request_that_waited_there_is_no_slack)
{
  begin_with(160, NULL);
  comb_after_many_moves();
  get(100, r); /* all that is free, at its end */
  CHECK_EQ(w.core->devices[0].slack_ran_out, 0);
  void *none;
  CHECK_STATUS(esper_malloc(w.core, 60 * MIB, r, &none), ESPER_OUT_OF_MEMORY);
  CHECK(w.core->devices[0].slack_ran_out >= 256);
  end();
}

/* 74 blocks of 2 MiB, one page each, of which three are free; and pages have moved often.
 * A private pool's 20 MiB let the peak allow more than 148. */
static void *aside;
static void many_small_blocks(void)
{
  static void *small[74];
  esper_pool *pool;
  esper_config config = {.large_segment_size = 2 * MIB, .segments = ESPER_SEGMENTS_MAPPED};
  begin_with(1024, &config);
  CHECK_OK(esper_pool_create(w.core, 0, 0, 1, &pool));
  CHECK_OK(esper_malloc_from(w.core, pool, 20 * MIB, r, &aside));
  sim_owner_begin(w.s, aside, 20 * MIB, 0, r.handle);
  for (int i = 0; i < 74; i++)
    small[i] = get(2, r);
  for (int i = 10; i < 40; i += 10)
    world_free(&w, small[i]);
  core_set_pages_moved(w.core, 256);
}

static void get_14_mib(void *context)
{
  (void)context;
  get(14, r);
}
static void grow_meanwhile(void *often, sim_call call, int device, void *object)
{
  (void)call, (void)device, (void)object;
  if ((*(int *)often)-- > 0)
    check_on_another_thread(get_14_mib, NULL);
}

/* Memory may grow to 174 MiB, a 25th more than the peak of 168; three free pages can be lent. */
TEST(what_grows_at_once_shares_the_slack)
{
  int often = 1;
  many_small_blocks();
  sim_before_call(w.s, SIM_CALL_page_create, grow_meanwhile, &often);
  get(14, r);
  CHECK(often < 1);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 259);
  sim_before_call(w.s, SIM_CALL_page_create, NULL, NULL);
  end();
}

/* The peak of 168 MiB counts until pages of the default pool go back. */
TEST(a_private_pool_gives_no_slack_back)
{
  many_small_blocks();
  world_free(&w, aside);
  CHECK_OK(esper_pool_release(w.core, 0, 0, 1));
  CHECK_OK(esper_pool_empty(w.core, 0, 0, 1));
  get(14, r);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 256);
  end();
}

/* What was the peak of active memory once says nothing of what is needed now. */
TEST(a_peak_of_long_ago_is_no_slack)
{
  enum { MOST_BLOCKS = 8192 };
  static struct {
    void *memory;
    size_t size;
  } live[MOST_BLOCKS];
  esper_config mapped = {.segments = ESPER_SEGMENTS_MAPPED};
  size_t count = 0, bytes = 0, top = 8192 * MIB;
  begin_with(65536, &mapped);
  core_set_pages_moved(w.core, 256);
  world_free(&w, get(30000, r));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  for (size_t size = 4 * MIB; size <= 256 * MIB; size *= 2) {
    for (; bytes + size <= top; bytes += size, count++) {
      live[count].memory = world_malloc(&w, size, r);
      live[count].size = size;
    }
    size_t kept = 0; /* every other one */
    for (size_t i = 0; i < count; i++) {
      if (i % 2)
        world_free(&w, live[i].memory), bytes -= live[i].size;
      else
        live[kept++] = live[i];
    }
    count = kept;
  }
  CHECK(reserved() * 100 <= (int64_t)(top / MIB) * 105);
  end();
}

/* Memory that the private pool of a graph has free is nobody's slack. */
TEST(an_idle_private_pool_takes_no_slack)
{
  void *p;
  esper_pool *pool;
  begin();
  CHECK_OK(esper_pool_create(w.core, 0, 0, 1, &pool));
  CHECK_OK(esper_malloc_from(w.core, pool, 60 * MIB, r, &p));
  CHECK_OK(esper_free(w.core, p));
  comb_after_many_moves();
  get(22, r);
  CHECK_EQ(world_counters(&w, 0).pages_moved, 256);
  CHECK_EQ(reserved(), 202);
  end();
}

/* It lends nothing, so what it cannot have is asked for no more often than without slack. */
TEST(a_private_pool_has_no_second_try)
{
  uint64_t asked[2];
  for (int often = 0; often < 2; often++) {
    void *p;
    esper_pool *pool;
    begin_with(160, NULL);
    get(140, r);
    core_set_pages_moved(w.core, often ? 256 : 0);
    CHECK_OK(esper_pool_create(w.core, 0, 0, 1, &pool));
    asked[often] = calls(SIM_CALL_page_create);
    CHECK_STATUS(esper_malloc_from(w.core, pool, 60 * MIB, r, &p), ESPER_OUT_OF_MEMORY);
    asked[often] = calls(SIM_CALL_page_create) - asked[often];
    end();
  }
  CHECK(asked[0] > 0);
  CHECK_EQ(asked[1], asked[0]);
}

TEST(pinned_segments_lend_nothing)
{
  begin();
  comb(20, 4, r);
  first_segment()->pinned = true;
  get(40, r);
  CHECK_EQ(reserved(), 120);
  CHECK_EQ(calls(SIM_CALL_page_unmap), 0);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(calls(SIM_CALL_page_unmap), 0);
  first_segment()->pinned = false;
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 80);
  end();
}

TEST(other_pools_lend_nothing)
{
  esper_pool *pool;
  void *p[4], *q;
  begin();
  CHECK_OK(esper_pool_create(w.core, 0, 3, 1, &pool));
  for (int i = 0; i < 4; i++)
    CHECK_OK(esper_malloc_from(w.core, pool, 20 * MIB, r, &p[i]));
  CHECK_OK(esper_free(w.core, p[0]));
  CHECK_OK(esper_free(w.core, p[2]));
  get(40, r);
  CHECK_EQ(reserved(), 120);
  CHECK_OK(esper_malloc_from(w.core, pool, 40 * MIB, r, &q)); /* nor to themselves */
  CHECK_EQ(reserved(), 160);
  CHECK_EQ(calls(SIM_CALL_page_unmap), 0);
  CHECK_OK(esper_free(w.core, p[1]));
  CHECK_OK(esper_free(w.core, p[3]));
  CHECK_OK(esper_free(w.core, q));
  CHECK_OK(esper_pool_release(w.core, 0, 3, 1));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 40);
  end();
}

TEST(a_page_that_cannot_be_mapped_goes_home)
{
  begin();
  comb(20, 8, r);
  void *p;
  sim_fail_call(w.s, SIM_CALL_page_map, 2, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc(w.core, 80 * MIB, r, &p), ESPER_DEVICE_ERROR);
  CHECK_EQ(reserved(), 160);
  world_check(&w);
  get(80, r);
  CHECK_EQ(reserved(), 160);
  end();
}

TEST(a_page_that_has_no_home_any_more_is_loose)
{
  begin();
  comb(20, 8, s);
  void *p;
  get(10, r);
  world_run(&w, s);
  sim_fail_calls_from(w.s, SIM_CALL_page_map, 2, ESPER_DEVICE_ERROR);
  sim_fail_call(w.s, SIM_CALL_page_release, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(esper_malloc(w.core, 80 * MIB, r, &p), ESPER_DEVICE_ERROR);
  CHECK_EQ(reserved(), 150);
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 20 * MIB);
  world_check(&w);
  sim_fail_call(w.s, SIM_CALL_page_map, 0, ESPER_OK);
  get(80, r);
  CHECK_EQ(reserved(), 170);
  CHECK_EQ(world_counters(&w, 0).bytes_orphaned, 0);
  world_check(&w);
  end();
}

/* A whole segment is one stream's memory, and would be all of it. */
TEST(a_mapped_segment_is_lent_and_does_not_move)
{
  begin();
  world_free(&w, get(64, r));
  const heap_t *home = first_segment()->heap;
  get(4, s);
  CHECK_EQ(world_counters(&w, 0).loans, 0); /* that asked */
  world_run(&w, r);
  get(4, s);
  CHECK_EQ(world_counters(&w, 0).loans, 1);
  CHECK(first_segment()->heap == home);
  end();
}

/* ---- captures -------------------------------------------------------------- */

static int is_captured(void *context, void *stream)
{
  return stream == *(void **)context;
}

TEST(a_heap_grows_inside_a_capture)
{
  void *handle;
  begin();
  comb(20, 4, r);
  handle = r.handle;
  CHECK_OK(esper_pool_begin(w.core, 0, 9, 0, is_captured, &handle));
  sim_capture_begin(w.s, 0, r.handle);
  void *p = used(30, r);
  world_free(&w, p);
  CHECK(used(30, r) == p);
  used(50, r);
  world_free(&w, p);
  CHECK(sim_capture_is_valid(w.s, 0, r.handle));
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  CHECK(graph);
  CHECK_OK(esper_pool_end(w.core, 0, 9, 0, NULL));
  CHECK_EQ(reserved(), 160);
  sim_graph_launch(w.s, graph, 0, s.handle);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL)); /* of the graph's nothing */
  CHECK_EQ(reserved(), 120);
  sim_graph_launch(w.s, graph, 0, s.handle);
  sim_graph_destroy(w.s, graph);
  CHECK_OK(esper_pool_release(w.core, 0, 9, 0));
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 90);
  end();
}

/* Pages that move part their stretch before they join two others. */
TEST(stretches_on_the_way_are_no_peak)
{
  begin();
  void *p[6];
  for (int i = 0; i < 6; i++)
    p[i] = get(20, r);
  world_free(&w, p[1]);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  world_free(&w, p[0]);
  world_free(&w, p[4]);
  CHECK(get(40, r) == p[0]);
  CHECK_EQ(reserved(), 100);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].peak, 2);
  end();
}

/* What parts a stretch goes back last. */
TEST(whole_stretches_go_back_first)
{
  begin();
  comb(20, 5, r);
  world_free(&w, get(20, s));
  world_run(&w, s);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 40);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 2);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].peak, 2);
  end();
}

/* What another thread takes while the driver is at work does not go. */
static void *taken[2];
static void take_meanwhile(void *context, sim_call call, int device, void *object)
{
  (void)context, (void)call, (void)device, (void)object;
  if (!taken[0])
    for (int i = 0; i < 2; i++)
      taken[i] = get(20, r);
}

TEST(what_was_taken_meanwhile_stays)
{
  begin();
  comb(20, 9, r);
  taken[0] = taken[1] = NULL;
  sim_before_call(w.s, SIM_CALL_page_release, take_meanwhile, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  sim_before_call(w.s, SIM_CALL_page_release, NULL, NULL);
  CHECK_EQ(reserved(), 80 + 40);
  for (int i = 0; i < 2; i++) {
    world_kernel(&w, r, taken[i]);
    world_free(&w, taken[i]);
  }
  world_run(&w, r);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 80);
  end();
}

static double cpu_seconds(void)
{
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* All blocks are not walked over for each: then it would take eight times as long as
 * getting them did; sanitizers make it three. */
TEST(many_scattered_pages_go_back_in_little_time)
{
  enum { MANY = 12000 };
  static void *p[MANY];
  sim_options options = {.virtual_memory = 1, .capacity = (size_t)MANY * 2 * MIB};
  world_begin_with(&w, &options, NULL);
  double begun = cpu_seconds();
  for (int i = 0; i < MANY; i++)
    p[i] = get(2, w.stream[0]);
  double got = cpu_seconds();
  for (int i = 0; i < MANY; i += 2)
    world_free(&w, p[i]);
  double freed = cpu_seconds();
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  double released = cpu_seconds();
  CHECK_EQ(reserved(), MANY);
  CHECK(released - freed < 5 * (got - begun));
  end();
}

/* As in PyTorch: whatever is free here can go. */
TEST(what_is_free_in_a_mapped_segment_is_no_inactive_split)
{
  begin();
  comb(20, 4, r);
  CHECK_EQ(world_stats(&w, 0).inactive_split_bytes[ESPER_ALL].peak, 0);
  CHECK_EQ(world_stats(&w, 0).inactive_split[ESPER_ALL].allocated, 0);
  end();
}

/* ---- a whole program ------------------------------------------------------- */

/* A step whose requests come again in the next one, as in training: what it keeps of each
 * layer goes in reverse order. */
static void same_step(void **kept, int layers)
{
  uint64_t x = 88172645463325252u;
  for (int i = 0; i < layers; i++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    void *a = world_malloc(&w, (1 + x % 700) * 64 * KIB, r);
    kept[i] = world_malloc(&w, (1 + x % 1013) * 128 * KIB, r);
    world_free(&w, a);
  }
  for (int i = layers - 1; i >= 0; i--) {
    void *a = world_malloc(&w, (1 + x % 900) * 128 * KIB, r);
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    world_free(&w, kept[i]);
    void *b = world_malloc(&w, (1 + x % 600) * 256 * KIB, r);
    world_free(&w, a);
    world_free(&w, b);
  }
}

TEST(pages_of_a_program_that_comes_round_again_come_to_rest)
{
  enum { LAYERS = 120 };
  static void *kept[LAYERS];
  esper_config mapped = {.segments = ESPER_SEGMENTS_MAPPED};
  begin_with(65536, &mapped);
  for (int step = 0; step < 60; step++)
    same_step(kept, LAYERS);
  uint64_t moved = world_counters(&w, 0).pages_moved;
  for (int step = 0; step < 20; step++)
    same_step(kept, LAYERS);
  esper_stats stats = world_stats(&w, 0);
  CHECK_EQ(world_counters(&w, 0).pages_moved, moved);
  CHECK(stats.reserved_bytes[ESPER_ALL].peak * 100 <= stats.active_bytes[ESPER_ALL].peak * 104);
  end();
}

/* Sizes that never come twice, as with sequences of any length. */
TEST(variable_lengths_reserve_little_more_than_they_use)
{
  enum { LAYERS = 12, STEPS = 40 };
  static void *kept[LAYERS], *weights[LAYERS];
  uint64_t x = 88172645463325252u;
  begin_with(16384, NULL);
  for (int i = 0; i < LAYERS; i++)
    weights[i] = get(64, r);
  for (int step = 0; step < STEPS; step++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    size_t unit = (1 + x % 64) * 128 * KIB;
    for (int i = 0; i < LAYERS; i++) {
      void *a = world_malloc(&w, 3 * unit + 1, r);
      kept[i] = world_malloc(&w, (size_t)(5 + i % 3) * unit, r);
      world_free(&w, a);
    }
    for (int i = LAYERS - 1; i >= 0; i--) {
      void *a = world_malloc(&w, 7 * unit, r);
      world_free(&w, kept[i]);
      world_free(&w, a);
    }
  }
  esper_stats stats = world_stats(&w, 0);
  CHECK(stats.reserved_bytes[ESPER_ALL].peak * 100 <= stats.active_bytes[ESPER_ALL].peak * 102);
  for (int i = 0; i < LAYERS; i++)
    world_free(&w, weights[i]);
  end();
}
