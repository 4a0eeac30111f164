/* Fences: pages of its own for each allocation, gone after its end. */
#include "core/memory/fence.h"

#include <pthread.h>

#include "memory/pages_world.h"

/* The work of r and of s is over, and the next free finds that. */
static void time_passes(void)
{
  sim_run_all(w.s);
  world_free(&w, get(1, w.stream[3]));
}

static bool is_mapped(const void *p)
{
  return sim_may_access(w.s, 0, p, 512);
}

SCENE_WITH(freed_memory_is_unmapped_and_its_addresses_stay_unused, begin_fenced(64))
{
  char *seen[100];
  for (int i = 0; i < 100; i++) {
    seen[i] = used(1, r);
    for (int k = 0; k < i; k++)
      CHECK(seen[i] != seen[k] && !is_mapped(seen[k]));
    world_free(&w, seen[i]);
    CHECK(is_mapped(seen[i]));
    time_passes();
    CHECK(!is_mapped(seen[i]));
  }
  CHECK_EQ(reserved_mib(), 0);
  CHECK_EQ(esper_fence_rounds(w.core), 0);
}

SCENE(pools_captures_and_what_is_live_have_none)
{
  void *before = get(1, r);
  CHECK_OK(esper_fence(w.core, 1));
  sim_capture_begin(w.s, 0, s.handle);
  void *captured = get(1, s);
  sim_graph *graph = sim_capture_end(w.s, 0, s.handle);
  void *pooled = world_malloc_from(&w, world_pool(&w, 0, 1, 0), MIB, r);
  CHECK(!is_fenced(before) && !is_fenced(captured) && !is_fenced(pooled));
  world_free(&w, before);
  CHECK(is_mapped(before));
  world_free(&w, pooled);
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  sim_graph_destroy(w.s, graph);
  CHECK_OK(esper_fence(w.core, 0));
  CHECK(!is_fenced(get(1, r)));
}

SCENE_WITH(memory_freed_after_the_fence_goes_too, begin_fenced(64))
{
  char *p = used(1, r);
  CHECK_OK(esper_fence(w.core, 0));
  world_free(&w, p);
  CHECK(is_mapped(p));
  world_run(&w, r);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(!is_mapped(p));
}

SCENE_WITH(a_peer_sees_memory_behind_a_fence,
           begin_on((sim_options){WHEN_TOLD, .devices = 2, .virtual_memory = 1}, NULL))
{
  CHECK_OK(esper_fence(w.core, 1));
  void *p = get(1, r);
  CHECK(!sim_may_access(w.s, 1, p, MIB));
  CHECK_OK(esper_add_peer(w.core, 0, 1));
  CHECK(sim_may_access(w.s, 1, p, MIB));
  CHECK(sim_may_access(w.s, 1, get(1, r), MIB));
}

/* The addresses of a device of 4 MiB are soon used up. */
TEST(addresses_come_round_the_oldest_first)
{
  sim_options options = {.virtual_memory = 1, .oracle = SIM_ORACLE_KNOWN, .capacity = 4 * MIB};
  begin_on(options, NULL);
  CHECK_OK(esper_fence(w.core, 1));
  char *stays = get(1, r), *first = get(1, r), *p = first;
  uint64_t count = 0;
  world_free(&w, first);
  while (!esper_fence_rounds(w.core)) {
    p = get(1, r);
    world_free(&w, p);
    CHECK(p != first || esper_fence_rounds(w.core));
    CHECK(++count < 1000000);
  }
  CHECK(count > 200);
  CHECK(p == first); /* past the live one */
  CHECK(is_mapped(stays));
  end();
}

/* Live memory lies so far apart that nothing large fits between it. */
SCENE_WITH(without_addresses_the_message_says_so, begin_fenced(64))
{
  get(1, r);
  sim_fail_calls_from(w.s, SIM_CALL_range_reserve, 1, ESPER_OUT_OF_MEMORY);
  for (int i = 0; i < 15; i++) {
    get(1, r);
    for (int k = 0; k < 3; k++) {
      world_free(&w, get(1, r));
      time_passes();
    }
  }
  esper_failure failure;
  CHECK_STATUS(try_malloc(30 * MIB, r), ESPER_OUT_OF_MEMORY);
  CHECK(strstr(esper_last_error(), "no addresses for a fence of 33554432 bytes on device 0"));
  esper_get_failure(&failure);
  CHECK_EQ(failure.addresses_missing, 32 * MIB);
  CHECK_STATUS(try_malloc(60 * MIB, r), ESPER_OUT_OF_MEMORY);
  CHECK(strstr(esper_last_error(), "out of memory on device 0"));
}

TEST(without_pages_there_is_no_fence)
{
  world_begin(&w);
  world_malloc(&w, MIB, w.stream[0]);
  CHECK_STATUS(esper_fence(w.core, 1), ESPER_UNSUPPORTED);
  CHECK(strstr(esper_last_error(), "cannot map pages"));
  CHECK(!is_fenced(world_malloc(&w, MIB, w.stream[0])));
  world_end(&w);

  world_begin(&w); /* a device that nobody has used yet */
  CHECK_OK(esper_fence(w.core, 1));
  CHECK_STATUS(try_malloc(MIB, w.stream[0]), ESPER_UNSUPPORTED);
  CHECK(strstr(esper_last_error(), "gets no fence"));
  world_end(&w);
}

/* Streams allocate, write, mark, read and free at random; the oracle watches every unmapping. */
SCENE_WITH(random_programs_work_behind_fences, begin_fenced(256))
{
  enum { LIVE = 24, STEPS = 20000 };
  static struct {
    char *p;
    esper_stream owner;
  } live[LIVE];
  memset(live, 0, sizeof live);
  srand(1);
  for (int i = 0; i < STEPS; i++) {
    int k = rand() % LIVE;
    esper_stream other = w.stream[rand() % 4];
    if (!live[k].p) {
      live[k].owner = w.stream[rand() % 4];
      live[k].p = world_malloc(&w, (size_t)(rand() % 5000 + 1) * KIB, live[k].owner);
      world_kernel(&w, live[k].owner, live[k].p);
      CHECK(is_fenced(live[k].p));
    } else if (rand() % 3 == 0) {
      world_read_on(&w, other, live[k].p, live[k].owner);
      if (rand() % 2)
        world_use(&w, live[k].p, other, 0);
      else
        world_record_stream(&w, live[k].p, other);
    } else {
      world_free(&w, live[k].p);
      live[k].p = NULL;
    }
    if (rand() % 4 == 0)
      world_run(&w, other);
    if (i % 500 == 0)
      world_check(&w);
  }
}

/* ---- threads ----------------------------------------------------------------- */

enum { THREADS = 4, TURNS = 3000 };

/* Each thread has a stream; what it does not free itself the next thread frees. */
static _Atomic(void *) handed_over[THREADS];

static void *allocate_and_free(void *number)
{
  int i = (int)(intptr_t)number;
  for (int turn = 0; turn < TURNS; turn++) {
    void *p = NULL;
    CHECK_OK(esper_malloc(w.core, (size_t)(turn % 700 + 1) * 4096, w.stream[i], &p));
    void *old = turn % 3 ? p : atomic_exchange(&handed_over[i], p);
    CHECK_OK(esper_free(w.core, old));
    old = atomic_exchange(&handed_over[(i + 1) % THREADS], NULL);
    CHECK_OK(esper_free(w.core, old));
    if (turn % 100 == 0)
      CHECK_OK(esper_fence(w.core, turn % 200 == 0));
  }
  return NULL;
}

SCENE_WITH(threads_share_the_addresses,
           begin_on((sim_options){.virtual_memory = 1, .capacity = 256 * MIB}, NULL))
{
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_create(&threads[i], NULL, allocate_and_free, (void *)(intptr_t)i));
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_join(threads[i], NULL));
  for (int i = 0; i < THREADS; i++)
    CHECK_OK(esper_free(w.core, atomic_exchange(&handed_over[i], NULL)));
}
