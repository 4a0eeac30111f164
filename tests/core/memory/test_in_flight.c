/* Memory in flight: before a thread reports that there is none, it waits for the calls that hold
 * some. */
#include "core/memory/in_flight.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "core/order/device.h"
#include "world.h"

static world w;

static pthread_t start(void *work(void *), void *argument)
{
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, work, argument));
  return thread;
}

/* ---- the calls that hold memory ------------------------------------------------ */

static device_t *device;

static void begin(void)
{
  world_begin(&w);
  CHECK_OK(core_device(w.core, 0, &device));
}

static unsigned returned_by_others(void)
{
  lock(&device->lock);
  unsigned returned = in_flight_returned_by_others(device);
  unlock(&device->lock);
  return returned;
}

static void begin_call(void)
{
  lock(&device->lock);
  in_flight_begin(device);
  unlock(&device->lock);
}

static void end_call(bool returns)
{
  lock(&device->lock);
  if (returns)
    in_flight_note_return(device);
  in_flight_end(device);
  unlock(&device->lock);
}

/* A whole call, of another thread. */
static void hold_and_return(void *unused)
{
  (void)unused;
  begin_call();
  end_call(true);
}

static void hold_and_keep(void *unused)
{
  (void)unused;
  begin_call();
  end_call(false);
}

TEST(where_no_memory_is_in_flight_nobody_waits)
{
  begin();
  unsigned returned_before = returned_by_others(), first = returned_before;
  CHECK(!in_flight_wait(device, &returned_before));
  check_on_another_thread(hold_and_keep, NULL);
  CHECK(!in_flight_wait(device, &returned_before));
  CHECK_EQ(returned_before, first);
  world_end(&w);
}

/* Of what comes back between a look for memory and the wait, the waiter is told. */
TEST(what_was_returned_since_the_last_look_is_told_once)
{
  begin();
  unsigned returned_before = returned_by_others();
  check_on_another_thread(hold_and_return, NULL);
  check_on_another_thread(hold_and_return, NULL);
  CHECK(in_flight_wait(device, &returned_before));
  CHECK_EQ(returned_before, returned_by_others());
  CHECK(!in_flight_wait(device, &returned_before));
  check_on_another_thread(hold_and_return, NULL);
  CHECK(in_flight_wait(device, &returned_before));
  world_end(&w);
}

/* What it returned was there when it looked. */
TEST(what_a_thread_returned_itself_is_nothing_new_to_it)
{
  begin();
  unsigned returned_before = returned_by_others();
  hold_and_return(NULL);
  CHECK_EQ(returned_by_others(), returned_before);
  CHECK(!in_flight_wait(device, &returned_before));
  world_end(&w);
}

static struct {
  unsigned returned_before;
  bool more;
  atomic_bool over;
} waiter;

static void *wait_for_calls(void *unused)
{
  (void)unused;
  waiter.more = in_flight_wait(device, &waiter.returned_before);
  atomic_store(&waiter.over, true);
  return NULL;
}

static void *count_and_wait(void *unused)
{
  waiter.returned_before = returned_by_others();
  return wait_for_calls(unused);
}

/* It waits, as far as can be seen. */
static pthread_t start_waiter(void)
{
  atomic_store(&waiter.over, false);
  pthread_t thread = start(count_and_wait, NULL);
  usleep(20000);
  CHECK(!atomic_load(&waiter.over));
  return thread;
}

TEST(a_call_that_holds_memory_is_waited_for_until_it_ends)
{
  for (int returns = 0; returns < 2; returns++) {
    begin();
    begin_call();
    pthread_t thread = start_waiter();
    end_call(returns);
    pthread_join(thread, NULL);
    CHECK_EQ(waiter.more, returns);
    world_end(&w);
  }
}

/* Whether another call still holds some or not. */
TEST(a_wait_ends_as_soon_as_something_was_returned)
{
  begin();
  begin_call();
  begin_call();
  pthread_t thread = start_waiter();
  end_call(true);
  pthread_join(thread, NULL);
  CHECK(waiter.more);
  thread = start_waiter();
  end_call(false);
  pthread_join(thread, NULL);
  CHECK(!waiter.more);
  world_end(&w);
}

TEST(a_wait_goes_on_while_a_call_that_returned_nothing_ends_beside_others)
{
  begin();
  begin_call();
  begin_call();
  pthread_t thread = start_waiter();
  end_call(false);
  usleep(20000);
  CHECK(!atomic_load(&waiter.over));
  end_call(true);
  pthread_join(thread, NULL);
  CHECK(waiter.more);
  world_end(&w);
}

/* ---- mallocs beside them --------------------------------------------------------- */

static sim_options on_pages(size_t capacity)
{
  return (sim_options){.virtual_memory = 1, .capacity = capacity};
}

/* Another thread's malloc, while a call has memory in flight. */
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
static void begin_malloc_beside(void *context, sim_call call, int index, void *object)
{
  (void)context, (void)call, (void)index, (void)object;
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

static void begin_beside(size_t size, esper_segments segments, sim_call during)
{
  sim_options options = on_pages(256 * MIB);
  options.completion = SIM_AT_ONCE;
  esper_config config = {.segments = segments};
  world_begin_with(&w, &options, &config);
  world_free(&w, world_malloc(&w, 100 * MIB, w.stream[0]));
  sim_set_capacity(w.s, 0, 100 * MIB); /* no more than that */
  prepare_malloc_beside(size, 2);
  sim_before_call(w.s, during, begin_malloc_beside, NULL);
}

/* `p` may be NULL. */
static void end_beside_with(void *p)
{
  CHECK(beside.begun);
  pthread_join(beside.thread, NULL);
  CHECK_STATUS(beside.status, ESPER_OK);
  world_free(&w, p);
  world_end(&w);
}

static void end_beside(void)
{
  end_beside_with(NULL);
}

/* None is exhausted while memory is on its way back to the driver, nor while it moves for
 * a request that fails. */
TEST(what_others_may_not_keep_is_waited_for)
{
  begin_beside(64 * MIB, ESPER_SEGMENTS_MAPPED, SIM_CALL_page_unmap);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  end_beside();
  begin_beside(64 * MIB, ESPER_SEGMENTS_CLASSIC, SIM_CALL_memory_free);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  end_beside();
  begin_beside(64 * MIB, ESPER_SEGMENTS_MAPPED, SIM_CALL_page_map);
  void *p;
  CHECK_STATUS(esper_malloc(w.core, 108 * MIB, w.stream[1], &p), ESPER_OUT_OF_MEMORY);
  end_beside();
}

/* Inside a capture, too. */
TEST(a_capture_waits_for_what_others_may_not_keep)
{
  for (int classic = 0; classic < 2; classic++) {
    begin_beside(64 * MIB, classic ? ESPER_SEGMENTS_CLASSIC : ESPER_SEGMENTS_MAPPED,
                 classic ? SIM_CALL_memory_free : SIM_CALL_page_unmap);
    world_free(&w, world_malloc(&w, 512, w.stream[2])); /* so that the core knows the stream */
    sim_capture_begin(w.s, 0, w.stream[2].handle);
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
    pthread_join(beside.thread, NULL);
    sim_graph_destroy(w.s, sim_capture_end(w.s, 0, w.stream[2].handle));
    CHECK(beside.begun);
    CHECK_STATUS(beside.status, ESPER_OK);
    world_end(&w);
  }
}

/* What comes from the driver is more than was asked for, and there is no more of it. */
static void leave_a_rest(size_t size, esper_segments segments, size_t capacity, sim_call during)
{
  for (int stream = 1; stream < 3; stream++) {
    sim_options options = on_pages(256 * MIB);
    options.completion = SIM_AT_ONCE;
    esper_config config = {.segments = segments};
    world_begin_with(&w, &options, &config);
    sim_set_capacity(w.s, 0, capacity);
    prepare_malloc_beside(size, stream);
    sim_after_call(w.s, during, begin_malloc_beside, NULL);
    void *p = world_malloc(&w, size, w.stream[1]);
    end_beside_with(p);
  }
}

TEST(what_others_have_too_much_of_is_waited_for)
{
  leave_a_rest(2 * MIB, ESPER_SEGMENTS_CLASSIC, 20 * MIB, SIM_CALL_memory_alloc);
  leave_a_rest(1000, ESPER_SEGMENTS_MAPPED, 2 * MIB, SIM_CALL_page_create);
}

/* Beside a malloc that waits already, memory comes, more than is needed. */
static void grow_beside(void *context, sim_call call, int index, void *object)
{
  if (beside.begun)
    return;
  begin_malloc_beside(context, call, index, object);
  CHECK(!atomic_load(&beside.returned));
  sim_set_capacity(w.s, 0, 120 * MIB);
  void *p = world_malloc(&w, 2 * MIB, w.stream[2]);
  for (int i = 0; i < 100000 && !atomic_load(&beside.returned); i++)
    usleep(1000);
  CHECK(atomic_load(&beside.returned));
  world_free(&w, p);
}

/* Nor does it wait until no memory is in flight, which may never be so. */
TEST(what_comes_meanwhile_is_not_waited_for_any_longer)
{
  begin_beside(2 * MIB, ESPER_SEGMENTS_CLASSIC, SIM_CALL_memory_free);
  sim_before_call(w.s, SIM_CALL_memory_free, grow_beside, NULL);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  end_beside();
}

static void *ask_in_vain(void *number)
{
  void *p;
  for (int i = 0; i < 20; i++)
    CHECK_STATUS(esper_malloc(w.core, 100 * MIB, w.stream[*(int *)number], &p),
                 ESPER_OUT_OF_MEMORY);
  return NULL;
}

static void let_others_in(void *context, sim_call call, int index, void *object)
{
  (void)context, (void)call, (void)index, (void)object;
  usleep(100);
}

/* Two that are refused have nothing for each other. */
TEST(who_is_refused_leaves_nothing)
{
  sim_options options = {.capacity = 64 * MIB, .completion = SIM_AT_ONCE};
  esper_config config = {.segments = ESPER_SEGMENTS_CLASSIC};
  world_begin_with(&w, &options, &config);
  sim_before_call(w.s, SIM_CALL_memory_alloc, let_others_in, NULL);
  int number[] = {1, 2};
  pthread_t threads[] = {start(ask_in_vain, &number[0]), start(ask_in_vain, &number[1])};
  for (int i = 0; i < 2; i++)
    pthread_join(threads[i], NULL);
  CHECK(sim_calls(w.s, SIM_CALL_memory_alloc) < (uint64_t)2 * 20 * 4);
  world_end(&w);
}
