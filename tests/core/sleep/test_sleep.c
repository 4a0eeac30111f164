/* Putting memory to sleep: what goes, what is waited for, and that nothing is lost whatever the
 * driver refuses. */

#include "sleep_world.h"

SCENE(device_memory_goes_and_live_bytes_are_kept)
{
  void *p = used_as("weights", 20 * MIB, r), *q = used_as("weights", 3000, r);
  get_as("weights", 512, s);
  size_t live = world_size(&w, q) + 20 * MIB + 512;
  size_t before = alive().bytes;
  esper_sleep_result result = sleep_all_of("weights");
  CHECK_EQ(alive().bytes, 0);
  CHECK_EQ(result.given_back, before);
  CHECK_EQ(result.kept, live);
  CHECK_EQ(alive().host_bytes, live);
  CHECK_EQ(reserved_mib(), 0);
  CHECK_EQ(world_stats(&w, 0).allocated_bytes[ESPER_ALL].current, live);
  esper_tag_stats stats = stats_of("weights");
  CHECK(stats.asleep && !stats.reserved);
  CHECK_EQ(stats.sleeping, before);
  CHECK_EQ(stats.host, live);
  CHECK_EQ(stats.allocated, live);
  esper_block_info info;
  CHECK(esper_find_block(w.core, q, &info) == ESPER_OK && info.asleep);
  world_check(&w);
  wake("weights");
  CHECK(esper_find_block(w.core, q, &info) == ESPER_OK && !info.asleep);
  CHECK_EQ(alive().bytes, before);
  world_kernel(&w, r, p);
  world_kernel(&w, s, q);
}

SCENE(free_memory_goes_for_good)
{
  used_as("weights", 20 * MIB, r);
  void *p = used_as("weights", 40 * MIB, r);
  world_free(&w, p);
  esper_sleep_result result = sleep_all_of("weights");
  CHECK_EQ(result.given_back, 60 * MIB);
  CHECK_EQ(result.kept, 20 * MIB);
  CHECK_EQ(stats_of("weights").sleeping, 20 * MIB);
  wake("weights");
  CHECK_EQ(reserved_mib(), 20);
}

SCENE(pending_memory_goes_once_its_uses_are_over)
{
  void *p = used_as("weights", 4 * MIB, r);
  get_as("weights", 20 * MIB, r);
  read_and_free(p, s);
  sleep_all_of("weights");
  CHECK_EQ(alive().bytes, 0);
  wake("weights");
}

SCENE(captures_refuse_it)
{
  used_as("weights", 4 * MIB, r);
  size_t before = alive().bytes;
  sim_capture_begin(w.s, 0, r.handle);
  CHECK_REFUSED(try_sleep(NULL, ESPER_KEEP_HOST, NULL), ESPER_CAPTURING,
                "cannot go to sleep while");
  sim_capture_abort(w.s, 0, r.handle);
  CHECK_EQ(alive().bytes, before);
  CHECK(get_as("weights", 512, r)); /* it is awake */
  sleep_all_of(NULL);
  wake(NULL);
}

TEST(a_core_may_be_destroyed_while_its_memory_sleeps)
{
  begin();
  used_as("weights", 20 * MIB, r);
  used(4, r);
  sleep_all_of(NULL);
  end(); /* nothing of it is left */
}

SCENE(contents_may_be_lost_on_request)
{
  sim_allow_loss(w.s, 1);
  void *p = used_as("kv", 20 * MIB, r);
  esper_sleep_result result;
  CHECK_OK(try_sleep("kv", ESPER_KEEP_NOTHING, &result));
  CHECK_EQ(result.kept, 0);
  CHECK_EQ(result.given_back, 20 * MIB);
  CHECK_EQ(alive().host_bytes, 0);
  CHECK_EQ(calls(SIM_CALL_copy_to_host), 0);
  wake("kv");
  CHECK_EQ(calls(SIM_CALL_memory_zero), 1);
  world_kernel(&w, r, p);
}

SCENE(bad_arguments_are_refused)
{
  get_as("weights", 512, r);
  CHECK_REFUSED(try_sleep("weigths", ESPER_KEEP_HOST, NULL), ESPER_INVALID, "'weigths'");
  CHECK_STATUS(try_wake("weigths"), ESPER_INVALID);
  CHECK_STATUS(try_sleep("weights", (esper_keep)7, NULL), ESPER_INVALID);
  const char *name = "weights";
  CHECK_STATUS(esper_sleep(w.core, 9, &name, 1, ESPER_KEEP_HOST, NULL), ESPER_INVALID);
  CHECK_STATUS(esper_wake(w.core, -2, &name, 1, NULL), ESPER_INVALID);
  const char *names[] = {"weights", NULL};
  CHECK_STATUS(esper_sleep(w.core, -1, names, 2, ESPER_KEEP_HOST, NULL), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "tag 2 of 2 has no name"));
  CHECK_STATUS(esper_wake(w.core, -1, names, 2, NULL), ESPER_INVALID);
  CHECK(!stats_of("weights").asleep);
}

SCENE(what_is_freed_asleep_is_not_active)
{
  void *p = used_as("t", 20 * MIB, r);
  sleep_all_of("t");
  CHECK_EQ(world_stats(&w, 0).active_bytes[ESPER_ALL].current, 20 * MIB);
  world_free(&w, p);
  CHECK_EQ(world_stats(&w, 0).active_bytes[ESPER_ALL].current, 0);
  wake("t");
}

/* 20 MiB on each of two devices. */
static void begin_with_two(void)
{
  begin_on((sim_options){WHEN_TOLD, .virtual_memory = 1, .devices = 2, .capacity = 256 * MIB},
           &(esper_config){.segments = ESPER_SEGMENTS_MAPPED});
  used_as("t", 20 * MIB, r);
  used_as("t", 20 * MIB, world_stream(&w, 1));
}

SIM_HOOK(limit_no_more)
{
  check_limit_malloc(-1);
}

/* Whatever the second one lacks: the first has not let go of anything yet. */
SCENE_WITH(of_several_devices_none_loses_contents_for_an_error, begin_with_two())
{
  used_as("first", 20 * MIB, r);
  sleep_all_of("first"); /* so that the simulation has what it needs for itself */
  wake("first");
  sim_allow_loss(w.s, 1);
  sim_before_call(w.s, SIM_CALL_page_release, limit_no_more, NULL);
  esper_status status = ESPER_HOST_MEMORY;
  int failures = 0;
  for (; status != ESPER_OK; failures++) {
    uint64_t unmapped = calls(SIM_CALL_page_unmap);
    status = WITH_MALLOCS(failures, try_sleep("t", ESPER_KEEP_NOTHING, NULL));
    if (status == ESPER_OK)
      break;
    CHECK_EQ(calls(SIM_CALL_page_unmap), unmapped);
    CHECK_EQ(stats_of("t").asleep, 0);
    world_check(&w);
  }
  CHECK(failures >= 2); /* a list of pages for each device */
  wake("t");
}

SCENE_WITH(of_several_devices_none_sleeps_after_an_error, begin_with_two())
{
  used_as("before", 20 * MIB, r);
  CHECK_OK(try_sleep("before", ESPER_KEEP_HOST, NULL));
  sim_fail_call(w.s, SIM_CALL_host_alloc, 2, ESPER_OUT_OF_MEMORY);
  CHECK(try_sleep(NULL, ESPER_KEEP_HOST, NULL) != ESPER_OK);
  CHECK_EQ(stats_of("t").asleep, 0);
  CHECK_EQ(stats_of("before").asleep, 1);
  wake(NULL);
}

/* ---- freed where the memory did not go after all ---------------------------- */

static char *freed_meanwhile;

static void use_and_free(void *block)
{
  world_kernel(&w, r, block);
  world_free(&w, block);
}

SIM_HOOK(use_and_free_meanwhile)
{
  sim_before_call(w.s, SIM_CALL_host_alloc, NULL, NULL);
  check_on_another_thread(use_and_free, freed_meanwhile);
}

SCENE(what_is_freed_while_a_sleep_fails_owes_its_owners_work)
{
  freed_meanwhile = used_as("kv", 20 * MIB, r);
  world_run(&w, r);
  sim_before_call(w.s, SIM_CALL_host_alloc, use_and_free_meanwhile, NULL);
  sim_fail_call(w.s, SIM_CALL_host_alloc, 1, ESPER_OUT_OF_MEMORY);
  CHECK_STATUS(try_sleep("kv", ESPER_KEEP_HOST, NULL), ESPER_HOST_MEMORY);
  CHECK(sim_pending(w.s, 0, r.handle) > 0);
  world_check(&w);
  CHECK(get_as("kv", 20 * MIB, s) != freed_meanwhile);
}

/* The block has a page that stayed and others that went. Its owner works on that page and frees
 * it. */
SCENE(what_stayed_because_it_is_shared_owes_its_owners_work)
{
  world_free(&w, get_as("kv", 20 * MIB, r));
  void *shared = get_as("kv", 4 * MIB, r), *address;
  char *block = get_as("kv", 30 * MIB, r);
  esper_page_name *names;
  size_t count;
  CHECK_OK(esper_share(w.core, shared, &address, &names, &count));
  free(names);
  esper_sleep_result result;
  CHECK_OK(try_sleep("kv", ESPER_KEEP_HOST, &result));
  CHECK(result.stays[ESPER_STAYS_SHARED] > 0 && result.kept > 0);
  sim_kernel(w.s, 0, r.handle, block, 8 * MIB, SIM_READ | SIM_WRITE);
  world_free(&w, block);
  wake("kv");
  CHECK(get_as("kv", 8 * MIB, s) != block);
  world_check(&w);
}

SCENE_WITH(beside_a_peer_that_cannot_be_asked_nothing_sleeps,
           begin_on((sim_options){WHEN_TOLD, .virtual_memory = 1, .devices = 2}, NULL))
{
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  used_as("t", 20 * MIB, r);
  sim_fail_call(w.s, SIM_CALL_memory_total, 1, ESPER_DEVICE_ERROR);
  CHECK_STATUS(try_sleep("t", ESPER_KEEP_HOST, NULL), ESPER_DEVICE_ERROR);
  CHECK_EQ(stats_of("t").asleep, 0);
  get_as("t", 4 * MIB, r);
  CHECK_OK(try_sleep("t", ESPER_KEEP_HOST, NULL));
  wake("t");
}

SCENE(what_sleeps_is_not_pinned)
{
  void *p = used_as("t", 20 * MIB, r), *address;
  world_run(&w, r);
  sleep_all_of("t");
  CHECK_STATUS(esper_pin(w.core, p, &address), ESPER_ASLEEP);
  wake("t");
  CHECK_OK(esper_pin(w.core, p, &address));
  world_free(&w, p);
  CHECK_OK(try_sleep("t", ESPER_KEEP_HOST, NULL));
  CHECK(!sim_would_fault(w.s, p, 20 * MIB));
  CHECK_OK(esper_unpin(w.core, address));
}

static sim_graph *graph_of_pool(esper_stream stream, const char *tag, void **p)
{
  void *filter;
  CHECK_OK(esper_pool_begin(w.core, 0, 7, 1, world_any_stream, NULL));
  sim_capture_begin(w.s, 0, stream.handle);
  sim_capture_group(w.s, 0, stream.handle, 1);
  *p = get_as(tag, 20 * MIB, stream);
  world_kernel(&w, stream, *p);
  world_free(&w, *p);
  sim_graph *graph = sim_capture_end(w.s, 0, stream.handle);
  CHECK_OK(esper_pool_end(w.core, 0, 7, 1, &filter));
  return graph;
}

SCENE(graphs_of_one_pool_share_no_memory_across_tags)
{
  void *p, *q;
  sim_graph *first = graph_of_pool(r, "a", &p), *second = graph_of_pool(s, "b", &q);
  CHECK(p != q);
  CHECK_EQ(stats_of("a").reserved, 20 * MIB);
  sim_graph_destroy(w.s, first);
  sim_graph_destroy(w.s, second);
}
