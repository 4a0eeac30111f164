/* One thread puts memory to sleep and wakes it, while others allocate, use and free memory under
 * tags that stay awake, and free memory that sleeps. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "sleep/sleep_world.h"

enum { THREADS = 3, CYCLES = 30, KEPT = 24 };

static atomic_bool done;

/* What one thread allocates sleeps, and another one frees it. */
static void *_Atomic shelf[KEPT];

static void *work(void *argument)
{
  esper_stream stream = w.stream[(int)(intptr_t)argument];
  char tag[16];
  snprintf(tag, sizeof tag, "thread %d", (int)(intptr_t)argument);
  CHECK_OK(esper_tag_push(tag));
  for (unsigned turn = 0; !atomic_load(&done); turn++) {
    void *p = block((turn * 7919) % (3 * MIB) + 1, stream);
    void *q = atomic_exchange(&shelf[turn % KEPT], NULL);
    if (q && turn % 5 == 0)
      world_free(&w, q);
    else if (q)
      atomic_store(&shelf[turn % KEPT], q);
    world_free(&w, p);
    if (turn % 64 == 0)
      CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  }
  CHECK_OK(esper_tag_pop());
  return NULL;
}

TEST(others_go_on_while_memory_sleeps)
{
  sim_options options = {.oracle = SIM_ORACLE_KNOWN,
                         .completion = SIM_SEEDED,
                         .virtual_memory = 1,
                         .capacity = 256 * MIB};
  pthread_t thread[THREADS];
  world_begin_with(&w, &options, NULL);
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_create(&thread[i], NULL, work, (void *)(intptr_t)i));
  const char *cold = "cold";
  CHECK_OK(esper_tag_push(cold));
  for (int cycle = 0; cycle < CYCLES; cycle++) {
    for (int i = 0; i < KEPT; i++) {
      void *none = NULL, *p = world_malloc(&w, (size_t)(i + 1) * 100000, w.stream[THREADS]);
      world_kernel(&w, w.stream[THREADS], p);
      if (!atomic_compare_exchange_strong(&shelf[i], &none, p))
        world_free(&w, p);
    }
    CHECK_OK(esper_sleep(w.core, -1, &cold, 1, ESPER_KEEP_HOST, NULL));
    CHECK_STATUS(try_malloc(512, w.stream[THREADS]), ESPER_ASLEEP);
    CHECK_OK(esper_wake(w.core, -1, &cold, 1, NULL));
  }
  CHECK_OK(esper_tag_pop());
  atomic_store(&done, true);
  for (int i = 0; i < THREADS; i++)
    pthread_join(thread[i], NULL);
  world_check(&w);
  world_end(&w);
}

/* ---- several threads put memory to sleep ----------------------------------- */

static void *sleep_often(void *name)
{
  const char *tag = name;
  for (int cycle = 0; cycle < CYCLES; cycle++) {
    const char *const *tags = cycle % 3 ? &tag : NULL; /* at times what the others have, too */
    CHECK_OK(esper_sleep(w.core, -1, tags, 1, ESPER_KEEP_HOST, NULL));
    CHECK_OK(esper_wake(w.core, -1, tags, 1, NULL));
    if (cycle % 5 == 0)
      esper_sleep_trim(w.core);
  }
  return NULL;
}

TEST(threads_may_put_the_same_memory_to_sleep)
{
  sim_options options = {.devices = 2,
                         .oracle = SIM_ORACLE_KNOWN,
                         .virtual_memory = 1,
                         .capacity = 256 * MIB};
  char *tags[THREADS] = {"first", "second", "third"};
  pthread_t thread[THREADS];
  void *p[THREADS];
  world_begin_with(&w, &options, NULL);
  for (int i = 0; i < THREADS; i++) {
    CHECK_OK(esper_tag_push(tags[i]));
    p[i] = world_malloc(&w, 12 * MIB, w.stream[i]);
    world_malloc(&w, 3 * MIB, world_stream(&w, 1));
    CHECK_OK(esper_tag_pop());
  }
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_create(&thread[i], NULL, sleep_often, tags[i]));
  for (int i = 0; i < THREADS; i++)
    pthread_join(thread[i], NULL);
  CHECK_OK(esper_wake(w.core, -1, NULL, 0, NULL));
  for (int i = 0; i < THREADS; i++)
    world_kernel(&w, w.stream[THREADS], p[i]);
  world_check(&w);
  world_end(&w);
}

/* ---- memory is shared as soon as it is awake ------------------------------ */

static atomic_bool tried;
static pthread_t sharer;

static void *share_when_awake(void *block)
{
  void *address;
  esper_page_name *pages;
  size_t count;
  esper_status status;
  while ((status = esper_share(w.core, block, &address, &pages, &count)) == ESPER_ASLEEP)
    atomic_store(&tried, true);
  CHECK_OK(status);
  free(pages);
  return NULL;
}

static void start_sharing(void *block, sim_call call, int device, void *object)
{
  (void)call, (void)device, (void)object;
  if (atomic_exchange(&tried, true))
    return;
  atomic_store(&tried, false);
  CHECK(!pthread_create(&sharer, NULL, share_when_awake, block));
  while (!atomic_load(&tried))
    ;
}

SCENE_WITH(another_thread_shares_memory_while_it_wakes,
           begin_on((sim_options){.oracle = SIM_ORACLE_KNOWN, .virtual_memory = 1},
                    &(esper_config){.large_segment_size = 4 * MIB}))
{
  for (int cycle = 0; cycle < CYCLES; cycle++) {
    void *p = used_as("cold", 50 * MIB, r);
    atomic_store(&tried, false);
    sim_after_call(w.s, SIM_CALL_copy_to_host, start_sharing, p);
    sleep_all_of("cold");
    sim_after_call(w.s, SIM_CALL_copy_to_host, NULL, NULL);
    wake("cold");
    pthread_join(sharer, NULL);
    world_check(&w);
    world_free(&w, p);
    CHECK(esper_unshare(w.core) > 0);
  }
}

/* ---- what others may do while memory is copied ---------------------------- */

static int looked;
static bool looking; /* calls within calls */

/* What needs all pages to stay, and then what changes them, which waits behind it. */
static void live_on(void *context)
{
  (void)context;
  esper_tag_stats *tags;
  size_t count;
  CHECK_OK(esper_add_peer(w.core, 0, looked % 2 + 1));
  void *p = world_malloc(&w, (size_t)(looked + 1) * 20 * MIB, w.stream[1]);
  world_free(&w, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_OK(esper_get_tag_stats(w.core, 0, &tags, &count));
  free(tags);
}

SIM_HOOK(look)
{
  if (looking || looked == 4)
    return;
  looking = true;
  looked++;
  check_on_another_thread(live_on, NULL); /* it ends */
  looking = false;
}

SCENE_WITH(nobody_else_waits_while_memory_is_copied_back,
           begin_on((sim_options){WHEN_TOLD, .devices = 3, .virtual_memory = 1}, NULL))
{
  looked = 0;
  for (int i = 0; i < 8; i++)
    used_as("cold", 40 * MIB, r);
  sleep_all_of("cold");
  sim_after_call(w.s, SIM_CALL_copy_to_device, look, NULL);
  wake("cold");
  CHECK(looked > 1);
}

/* ---- others wait for the memory that a sleep gives back --------------------- */

static bool met;
static pthread_t waker;

static void *wake_other(void *context)
{
  wake("other");
  return context;
}

SIM_HOOK(start_waker)
{
  if (met)
    return;
  met = true;
  CHECK(!pthread_create(&waker, NULL, wake_other, NULL));
  usleep(100000); /* if it does not wait, it goes wrong in this time */
}

/* Both are too large to be awake together. */
SCENE_WITH(a_wake_waits_for_the_end_of_a_sleep,
           begin_on((sim_options){WHEN_TOLD, .virtual_memory = 1, .capacity = 100 * MIB},
                    &(esper_config){.large_segment_size = 4 * MIB}))
{
  void *q = used_as("other", 80 * MIB, r);
  sleep_all_of("other");
  used_as("one", 80 * MIB, r);
  met = false;
  sim_after_call(w.s, SIM_CALL_copy_to_host, start_waker, NULL);
  sleep_all_of("one");
  pthread_join(waker, NULL);
  world_kernel(&w, s, q);
  world_check(&w);
}

/* A malloc without memory gives up the embedder's locks to drain, and to wait for the sleep. */
static atomic_int gave_up;

static void give_up_locks(void (*wait)(void *), void *argument)
{
  atomic_fetch_add(&gave_up, 1);
  wait(argument);
}

static void *malloc_now(void *context)
{
  world_kernel(&w, s, world_malloc(&w, 60 * MIB, s));
  return context;
}

SIM_HOOK(start_malloc)
{
  if (met)
    return;
  met = true;
  CHECK(!pthread_create(&waker, NULL, malloc_now, NULL));
  while (atomic_load(&gave_up) < 2)
    ;
}

SCENE_WITH(a_malloc_waits_for_the_pages_that_a_sleep_sends,
           begin_on((sim_options){WHEN_TOLD, .virtual_memory = 1, .capacity = 100 * MIB},
                    &(esper_config){.while_waiting = give_up_locks}))
{
  used_as("one", 80 * MIB, r);
  met = false;
  sim_after_call(w.s, SIM_CALL_copy_to_host, start_malloc, NULL);
  sleep_all_of("one");
  pthread_join(waker, NULL);
  CHECK(atomic_load(&gave_up) == 2);
  world_check(&w);
}
