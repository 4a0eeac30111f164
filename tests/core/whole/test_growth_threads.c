/* Memory grows and goes back in one thread at a time, so a thread that finds none has not
 * overlooked memory that another holds for the moment. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "sleep/sleep_world.h"

static pthread_t start(void *work(void *), void *argument)
{
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, work, argument));
  return thread;
}

/* Another thread's malloc, while a call holds memory. */
static struct {
  size_t size;
  int stream;
  pthread_t thread;
  bool begun;
  atomic_bool returned;
  esper_status status;
} beside;

static void *malloc_beside(void *unused)
{
  (void)unused;
  void *p;
  beside.status = esper_malloc(w.core, beside.size, w.stream[beside.stream], &p);
  atomic_store(&beside.returned, true);
  if (beside.status == ESPER_OK)
    CHECK_OK(esper_free(w.core, p));
  return NULL;
}

/* It has time to fail. */
SIM_HOOK(begin_malloc_beside)
{
  if (beside.begun)
    return;
  beside.begun = true;
  beside.thread = start(malloc_beside, NULL);
  for (int i = 0; i < 50 && !atomic_load(&beside.returned); i++)
    usleep(1000);
}

static void prepare_malloc_beside(size_t size, int stream)
{
  beside.size = size;
  beside.stream = stream;
  beside.begun = false;
  atomic_store(&beside.returned, false);
}

static void begin_at_once(esper_segments segments)
{
  begin_on((sim_options){.virtual_memory = 1, .completion = SIM_AT_ONCE, .capacity = 256 * MIB},
           &(esper_config){.segments = segments});
}

static void begin_beside(esper_segments segments, sim_call during)
{
  begin_at_once(segments);
  world_free(&w, world_malloc(&w, 100 * MIB, w.stream[0]));
  sim_set_capacity(w.s, 0, 100 * MIB); /* no more than that */
  prepare_malloc_beside(64 * MIB, 2);
  sim_before_call(w.s, during, begin_malloc_beside, NULL);
}

static void join_malloc_beside(void)
{
  CHECK(beside.begun);
  pthread_join(beside.thread, NULL);
  CHECK_STATUS(beside.status, ESPER_OK);
}

static void end_beside(void)
{
  join_malloc_beside();
  end();
}

/* None is exhausted while memory is on its way back to the driver, nor while it moves for
 * a request that fails. */
TEST(what_others_may_not_keep_is_waited_for)
{
  begin_beside(ESPER_SEGMENTS_MAPPED, SIM_CALL_page_unmap);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  end_beside();
  begin_beside(ESPER_SEGMENTS_CLASSIC, SIM_CALL_memory_free);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  end_beside();
  begin_beside(ESPER_SEGMENTS_MAPPED, SIM_CALL_page_map);
  CHECK_STATUS(try_malloc(108 * MIB, w.stream[1]), ESPER_OUT_OF_MEMORY);
  end_beside();
}

TEST(what_is_going_to_sleep_is_waited_for)
{
  begin_at_once(ESPER_SEGMENTS_MAPPED);
  sim_set_capacity(w.s, 0, 100 * MIB);
  get_as("cold", 90 * MIB, r);
  prepare_malloc_beside(60 * MIB, 2);
  sim_before_call(w.s, SIM_CALL_copy_to_host, begin_malloc_beside, NULL);
  sleep_all_of("cold");
  join_malloc_beside();
  wake("cold");
  end();
}

/* What comes from the driver is more than was asked for, and there is no more of it. */
static void leave_a_rest(size_t size, esper_segments segments, size_t capacity, sim_call during)
{
  for (int stream = 1; stream < 3; stream++) {
    begin_at_once(segments);
    sim_set_capacity(w.s, 0, capacity);
    prepare_malloc_beside(size, stream);
    sim_after_call(w.s, during, begin_malloc_beside, NULL);
    world_malloc(&w, size, w.stream[1]);
    end_beside();
  }
}

TEST(what_others_have_too_much_of_is_waited_for)
{
  leave_a_rest(2 * MIB, ESPER_SEGMENTS_CLASSIC, 20 * MIB, SIM_CALL_memory_alloc);
  leave_a_rest(1000, ESPER_SEGMENTS_MAPPED, 2 * MIB, SIM_CALL_page_create);
}

static void *ask_in_vain(void *number)
{
  for (int i = 0; i < 20; i++)
    CHECK_STATUS(try_malloc(100 * MIB, w.stream[*(int *)number]), ESPER_OUT_OF_MEMORY);
  return NULL;
}

SIM_HOOK(let_others_in)
{
  usleep(100);
}

/* Two that are refused have nothing for each other. */
SCENE_WITH(who_is_refused_leaves_nothing,
           begin_on((sim_options){.capacity = 64 * MIB, .completion = SIM_AT_ONCE},
                    &(esper_config){.segments = ESPER_SEGMENTS_CLASSIC}))
{
  sim_before_call(w.s, SIM_CALL_memory_alloc, let_others_in, NULL);
  int number[] = {1, 2};
  pthread_t threads[] = {start(ask_in_vain, &number[0]), start(ask_in_vain, &number[1])};
  for (int i = 0; i < 2; i++)
    pthread_join(threads[i], NULL);
  CHECK(sim_calls(w.s, SIM_CALL_memory_alloc) < (uint64_t)2 * 20 * 4);
}
