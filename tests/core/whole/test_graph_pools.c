/* Private pools as graphs use them: quiesced when they are begun, captured into, ended. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "pools/graph_pools.h"

/* ---- what a begin waits for --------------------------------------------------- */

/* s is being captured, so no event says when it is done with what it freed; when its use
 * of p was over an older one does. */
SCENE(older_events_of_a_captured_stream_are_waited_for)
{
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 16 * MIB, s);
  world_kernel(&w, r, p);
  world_read_marked(&w, s, p, r);
  world_kernel(&w, s, q);
  world_free(&w, p);
  world_free(&w, q);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  sim_capture_begin(w.s, 0, s.handle);
  capture_begin(ID);
  CHECK(world_malloc(&w, 12 * MIB, r) == p);
  CHECK(world_malloc(&w, 16 * MIB, r) != q);
  sim_graph *graph = capture_end(ID);
  CHECK(sim_capture_is_valid(w.s, 0, s.handle));
  sim_capture_abort(w.s, 0, s.handle);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
}

/* ---- what is freed meanwhile ---------------------------------------------------- */

enum { FREED_AT_ONCE = 32 };

typedef struct other_thread {
  void *kept;
  void **freed;     /* FREED_AT_ONCE of them */
  atomic_int count; /* of those that it has still to free */
  atomic_bool over;
} other_thread;

static void *look_and_free(void *argument)
{
  other_thread *other = argument;
  esper_block_info info;
  while (!atomic_load(&other->over)) {
    CHECK_OK(esper_find_block(w.core, other->kept, &info));
    CHECK(info.live && info.address == other->kept);
    for (int count = atomic_load(&other->count); count; count--) {
      CHECK_OK(esper_free(w.core, other->freed[count - 1]));
      atomic_store(&other->count, count - 1);
    }
  }
  return NULL;
}

static void wait_for_frees(other_thread *other)
{
  while (atomic_load(&other->count))
    sched_yield();
}

/* Heaps of one stream are united then, and the others go: ThreadSanitizer sees who still reads
 * those. What is freed then was allocated in an earlier capture, and its segment is about to change
 * its home. */
SCENE(live_memory_is_looked_at_and_freed_while_its_pool_is_quiesced)
{
  enum { TIMES = 20 };
  pthread_t id;
  esper_pool *pool;
  other_thread other = {0};
  sim_graph *graphs[TIMES];
  void *outside[TIMES][FREED_AT_ONCE]; /* of other heaps than the captures' */
  CHECK_OK(esper_pool_create(w.core, 0, ID, 0, &pool));
  CHECK_OK(esper_malloc_from(w.core, pool, 512, r, &other.kept));
  CHECK(pthread_create(&id, NULL, look_and_free, &other) == 0);
  for (int i = 0; i < TIMES; i++) {
    capture_begin(ID);
    block(512, r);
    graphs[i] = capture_end(ID);
    wait_for_frees(&other);
    for (int k = 0; k < FREED_AT_ONCE; k++)
      CHECK_OK(esper_malloc_from(w.core, pool, 512, r, &outside[i][k]));
    other.freed = outside[i ? i - 1 : 0];
    if (i)
      atomic_store(&other.count, FREED_AT_ONCE);
  }
  wait_for_frees(&other);
  other.freed = outside[TIMES - 1];
  atomic_store(&other.count, FREED_AT_ONCE);
  wait_for_frees(&other);
  atomic_store(&other.over, true);
  CHECK(pthread_join(id, NULL) == 0);
  CHECK_OK(esper_free(w.core, other.kept));
  world_check(&w);
  for (int i = 0; i < TIMES; i++)
    drop(graphs[i], ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
}

/* A pool is begun again while a capture still works in it, and the driver does not
 * say so: what that capture marked counts on. */
SCENE(a_capture_that_cannot_be_asked_about_is_not_taken_for_over)
{
  capture_begin(ID);
  void *x = block(12 * MIB, r);
  read_and_free(x, s);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  sim_fail_call(w.s, SIM_CALL_stream_capture, 1, ESPER_DEVICE_ERROR);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, world_is_captured, &w));
  CHECK_EQ(sim_faults(w.s), 1);
  void *y = world_malloc(&w, 12 * MIB, r);
  CHECK(y != x); /* s may still read it */
  world_kernel(&w, r, y);
  world_wait(&w, r, s);
  sim_graph *graph = capture_end(ID);
  CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
  drop(graph, ID);
}

/* Memory of a graph's pool with a use that has no event, freed while a capture goes on
 * in its heap, where nothing could be held. */
typedef struct {
  bool earlier_capture, use_inside, freed_inside;
} owing;

static void owe_again_and_again(owing how)
{
  begin_on((sim_options){.oracle = SIM_ORACLE_OFF, .completion = SIM_WHEN_TOLD}, NULL);
  void *x, *y;
  sim_graph *earlier = NULL;
  world_pool(&w, 0, 1, 0);
  for (int i = 0; i < 4; i++) {
    CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, NULL));
    if (how.earlier_capture)
      sim_capture_begin(w.s, 0, r.handle);
    CHECK_OK(esper_malloc(w.core, 3 * MIB, r, &x));
    if (how.earlier_capture)
      earlier = sim_capture_end(w.s, 0, r.handle);
    CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
    CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
    if (!how.use_inside)
      world_record_stream(&w, x, s);
    CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, NULL));
    sim_capture_begin(w.s, 0, r.handle);
    CHECK_OK(esper_malloc(w.core, 512, r, &y));
    world_wait(&w, s, r);
    sim_kernel(w.s, 0, s.handle, NULL, 0, SIM_READ);
    if (how.use_inside)
      world_use(&w, x, s, 0);
    world_wait(&w, r, s);
    if (how.freed_inside)
      world_free(&w, x);
    world_free(&w, y);
    sim_graph *graph = captured(r);
    CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
    CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
    if (!how.freed_inside)
      world_free(&w, x);
    sim_graph_destroy(w.s, graph);
    if (how.earlier_capture)
      sim_graph_destroy(w.s, earlier);
  }
  for (int i = 0; i < 2; i++) { /* a use held from the first quiesce on ends with the next */
    CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, NULL));
    CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
    CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
    CHECK_OK(sim_device_synchronize(w.s, 0));
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  }
  CHECK_OK(esper_pool_begin(w.core, 0, 1, 0, all, NULL));
  CHECK_OK(esper_pool_end(w.core, 0, 1, 0, NULL));
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  CHECK_EQ(world_counters(&w, 0).blocks_held, 0);
  CHECK_EQ(world_counters(&w, 0).bytes_pending, 0);
  CHECK_OK(esper_pool_release(w.core, 0, 1, 0));
  world_end(&w);
}

TEST(memory_that_owes_what_has_no_event_is_not_lost_to_its_pool)
{
  owe_again_and_again((owing){.freed_inside = true});
  owe_again_and_again((owing){.earlier_capture = true, .freed_inside = true});
  owe_again_and_again((owing){.earlier_capture = true, .use_inside = true, .freed_inside = true});
  owe_again_and_again((owing){.use_inside = true});
}

/* Something was recorded on the owner's stream between the quiesce and the capture. */
SCENE(memory_that_its_owner_used_since_the_quiesce_waits_for_the_next)
{
  capture_begin(ID);
  void *saved = world_malloc(&w, 12 * MIB, r);
  sim_graph *first = capture_end(ID);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, world_is_captured, &w));
  world_kernel(&w, r, saved);
  void *x = world_malloc(&w, 512, s);
  world_read_marked(&w, r, x, s);
  sim_capture_begin(w.s, 0, r.handle);
  sim_capture_group(w.s, 0, r.handle, ID);
  world_free(&w, world_malloc(&w, 512, r));
  world_free(&w, saved);
  CHECK(world_malloc(&w, 12 * MIB, r) != saved);
  sim_graph *second = capture_end(ID);
  drop(first, ID);
  drop(second, ID);
}

/* The same calls give the same memory, whatever has completed by then. */
TEST(the_addresses_chosen_depend_on_the_calls_alone)
{
  uintptr_t got[2][6];
  for (int late = 0; late < 2; late++) {
    begin();
    CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, all, NULL));
    void *warm[3];
    for (int i = 0; i < 3; i++) {
      warm[i] = world_malloc(&w, (size_t)(12 + i) * MIB, i == 1 ? s : r);
      world_kernel(&w, i == 1 ? s : r, warm[i]);
    }
    for (int i = 0; i < 3; i++)
      world_free(&w, warm[i]);
    CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
    if (!late)
      sim_run_all(w.s);
    capture_begin(ID);
    for (int i = 0; i < 6; i++) {
      void *p = world_malloc(&w, (size_t)(11 + i % 3) * MIB, r);
      got[late][i] = (uintptr_t)p;
      world_kernel(&w, r, p);
      if (i % 2)
        world_free(&w, p);
      if (late)
        sim_run_all(w.s);
    }
    sim_graph *graph = capture_end(ID);
    CHECK_OK(esper_pool_release(w.core, 0, ID, 0));
    drop(graph, ID);
    end();
  }
  CHECK(!memcmp(got[0], got[1], sizeof got[0]));
}
