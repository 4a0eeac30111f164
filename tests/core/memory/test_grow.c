/* How a heap of mapped segments grows: into which hole, and with which pages. */
#include "draw.h"
#include "pages_world.h"

SCENE(a_heap_grows_by_what_is_missing)
{
  void *p = get(5, r);
  CHECK_EQ(reserved_mib(), 6);
  void *q = get(3, r);
  CHECK_EQ((char *)q - (char *)p, 5 * MIB);
  CHECK_EQ(reserved_mib(), 8);
  world_free(&w, q);
  CHECK(get(40, r) == q); /* the free memory at the end is a part of it */
  CHECK_EQ(reserved_mib(), 46);
  CHECK_EQ(world_stats(&w, 0).segment[ESPER_ALL].current, 1);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 0);
  CHECK_EQ(calls(SIM_CALL_range_reserve), 1);
}

/* ---- the size of pages -------------------------------------------------------- */

static const esper_config DEFAULTS = {.segments = ESPER_SEGMENTS_MAPPED};

static uint64_t pages_for(size_t mib)
{
  uint64_t before = calls(SIM_CALL_page_create);
  get(mib, r);
  return calls(SIM_CALL_page_create) - before;
}

SCENE_WITH(while_memory_is_plentiful_a_request_takes_few_pages, begin_with(16384, &DEFAULTS))
{
  CHECK_EQ(pages_for(4), 1);
  CHECK_EQ(pages_for(30), 1);
  CHECK_EQ(pages_for(512), 16); /* 32 MiB each: larger ones take the driver as long */
  CHECK_EQ(reserved_mib(), 546);
  CHECK_EQ(pages_for(1111), 33); /* of 34 MiB */
  CHECK_EQ(pages_for(6144), 48); /* larger ones than 128 MiB are hardly cheaper */
}

SCENE_WITH(while_memory_is_short_pages_are_small, begin_with(512, &DEFAULTS))
{
  get(440, r); /* an eighth of the device, 64 MiB, is not free */
  CHECK_EQ(pages_for(20), 5);
  CHECK_EQ(pages_for(40), 5);
  CHECK_EQ(reserved_mib(), 500);
}

SCENE_WITH(after_a_refusal_pages_are_small, begin_with(16384, &DEFAULTS))
{
  CHECK_STATUS(try_malloc(20000 * MIB, r), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(pages_for(40), 5);
}

/* They never move, so large ones waste nothing. */
SCENE_WITH(pages_of_private_pools_are_as_large_as_the_request, begin_with(1024, &DEFAULTS))
{
  world_malloc_from(&w, world_pool(&w, 0, 7, 1), 900 * MIB, r);
  CHECK_EQ(calls(SIM_CALL_page_create), 1);
}

TEST(options_of_classic_segments_do_not_ask_for_them)
{
  esper_config given[] = {{.max_split_size = 64 * MIB}, /* as vLLM asks for while weights load */
                          {.max_non_split_rounding = 40 * MIB},
                          {.large_segment_size = 20 * MIB}};
  for (int i = 0; i < 3; i++) {
    begin_with(256, &given[i]);
    get(5, r);
    CHECK(calls(SIM_CALL_page_create) > 0);
    end();
  }
}

static uint64_t state = 1;

static size_t draw(size_t below)
{
  return (size_t)draw_below(&state, below);
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

/* Whoever creates a pool may have its segments registered elsewhere, which cannot follow
 * pages; a pool that a capture makes has them. */
TEST(created_pools_have_classic_segments_unless_mapped_ones_are_asked_for)
{
  for (int asked = 0; asked < 2; asked++) {
    esper_config config = {.segments = asked ? ESPER_SEGMENTS_MAPPED : ESPER_SEGMENTS_AUTO};
    begin_with(256, &config);
    world_malloc_from(&w, world_pool(&w, 0, 0, 1), 5 * MIB, r);
    CHECK_EQ(reserved_mib(), asked ? 6 : 20);
    CHECK_OK(esper_pool_begin(w.core, 0, 2, 0, world_any_stream, NULL));
    world_malloc_from(&w, world_pool(&w, 0, 2, 0), 5 * MIB, r); /* there already */
    CHECK_OK(esper_pool_end(w.core, 0, 2, 0, NULL));
    CHECK_EQ(reserved_mib(), asked ? 12 : 26);
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

/* A program with a bit of everything; how often each function of the driver was called. */
static void count_calls(int virtual_memory, esper_segments kind, uint64_t *counts)
{
  begin_on((sim_options){WHEN_TOLD, .virtual_memory = virtual_memory, .capacity = 256 * MIB},
           &(esper_config){.segments = kind});
  void *p = used(30, r), *q = used(3, s), *small = world_malloc(&w, 700, r);
  world_read_marked(&w, s, p, r);
  world_free(&w, p);
  p = used(24, r);
  world_free(&w, q);
  CHECK_OK(esper_set_memory_fraction(w.core, 0, 0.5));
  CHECK_STATUS(try_malloc(200 * MIB, s), ESPER_OUT_OF_MEMORY);
  sim_capture_begin(w.s, 0, r.handle);
  world_free(&w, used(12, r));
  sim_graph *graph = sim_capture_end(w.s, 0, r.handle);
  sim_graph_destroy(w.s, graph);
  world_free(&w, world_malloc_from(&w, world_pool(&w, 0, 3, 1), 5 * MIB, r));
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
SCENE(where_the_granule_is_not_known_segments_are_classic)
{
  sim_fail_call(w.s, SIM_CALL_page_granularity, 1, ESPER_DEVICE_ERROR);
  get(5, r);
  CHECK_EQ(reserved_mib(), 20);
  get(60, r);
  CHECK_EQ(reserved_mib(), 80);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
  CHECK_EQ(calls(SIM_CALL_page_granularity), 2);
}

SCENE(without_addresses_segments_are_classic)
{
  sim_fail_call(w.s, SIM_CALL_range_reserve, 1, ESPER_OUT_OF_MEMORY);
  get(5, r);
  CHECK_EQ(reserved_mib(), 20);
  get(60, r);
  CHECK_EQ(reserved_mib(), 80);
  CHECK_EQ(calls(SIM_CALL_memory_alloc), 1);
}

SIM_HOOK(host_memory_runs_out)
{
  check_limit_malloc(call == SIM_CALL_range_reserve ? 0 : -1);
}

/* No page table: the addresses go back. */
SCENE(without_host_memory_segments_are_classic)
{
  void *p = world_malloc(&w, 512, r); /* what comes next has but its table to get */
  CHECK_EQ(reserved_mib(), 2);
  sim_after_call(w.s, SIM_CALL_range_reserve, host_memory_runs_out, NULL);
  sim_before_call(w.s, SIM_CALL_range_free, host_memory_runs_out, NULL);
  get(5, r);
  CHECK_EQ(reserved_mib(), 2 + 20);
  CHECK_EQ(alive().ranges, 1);
  sim_after_call(w.s, SIM_CALL_range_reserve, NULL, NULL);
  get(60, r);
  CHECK_EQ(reserved_mib(), 22 + 60);
  CHECK_EQ(alive().ranges, 2);
  world_free(&w, p);
}

TEST(max_split_size_is_no_matter_of_mapped_segments)
{
  esper_config config = {.segments = ESPER_SEGMENTS_MAPPED, .max_split_size = 20 * MIB};
  begin_with(256, &config);
  world_free(&w, get(64, r)); /* oversize, and would be left alone */
  get(2, r);
  get(30, r);
  CHECK_EQ(reserved_mib(), 64);
  end();
}

static const esper_config SMALL_PAGES = {.large_segment_size = 4 * MIB,
                                         .segments = ESPER_SEGMENTS_MAPPED};

/* Pages of what there is, made one by one until there is none, would leave nothing to
 * other processes meanwhile. */
SCENE_WITH(what_the_device_does_not_have_is_not_tried, begin_with(256, &SMALL_PAGES))
{
  void *q = get(100, r);
  uint64_t created = calls(SIM_CALL_page_create);
  CHECK_STATUS(try_malloc(200 * MIB, r), ESPER_OUT_OF_MEMORY);
  CHECK_EQ(calls(SIM_CALL_page_map), created);       /* of those there were */
  CHECK(calls(SIM_CALL_page_create) <= created + 3); /* all of it as one, in each try */
  CHECK_EQ(reserved_mib(), 100);
  world_free(&w, q);
  get(200, r); /* the 100 are a part of it */
  CHECK_EQ(reserved_mib(), 200);
}

/* The system may keep caches in what is not free, and give them up when it is asked. */
SCENE_WITH(a_device_may_have_more_than_it_says, begin_with(256, &SMALL_PAGES))
{
  sim_set_caches(w.s, 0, 216 * MIB);
  get(200, r);
  CHECK_EQ(reserved_mib(), 200);
  CHECK_EQ(calls(SIM_CALL_page_release), 1); /* of the one that asked */
}

/* A device that has failed says so, as it does where a classic segment is asked for. */
SCENE_WITH(a_device_that_cannot_say_what_it_has_is_not_asked_for_more,
           begin_with(256, &SMALL_PAGES))
{
  get(2, r);
  sim_fail_call(w.s, SIM_CALL_memory_info, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(try_malloc(100 * MIB, r), ESPER_DEVICE_ERROR);
  CHECK_EQ(reserved_mib(), 2);
  world_check(&w);
  get(100, r);
}
