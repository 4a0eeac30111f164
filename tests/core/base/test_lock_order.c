/* The checker of the lock order, and how many locks a malloc takes. In builds without the checker
 * nothing aborts and nothing is counted. */
#include "core/base/lock.h"
#include "one_world.h"

#ifdef ESPER_LOCK_ORDER
enum { CHECKED = 1 };
#else
enum { CHECKED = 0 };
static unsigned long lock_order_taken(lock_rank rank)
{
  (void)rank;
  return 0;
}
#endif

static mutex_t record, device, other_device, leaf, unranked, sleeps, other_sleeps;

static void init(void)
{
  mutex_init(&record, LOCK_RECORD);
  mutex_init(&device, LOCK_DEVICE);
  mutex_init(&other_device, LOCK_DEVICE);
  mutex_init(&leaf, LOCK_LEAF);
  mutex_init(&sleeps, LOCK_SLEEP);
  mutex_init(&other_sleeps, LOCK_SLEEP);
}

TEST(locks_may_be_taken_in_the_order_of_their_ranks)
{
  init();
  for (int i = 0; i < 3; i++) {
    lock(&record);
    lock(&device);
    lock(&leaf);
    unlock(&device); /* released in any order */
    unlock(&leaf);
    lock_order_call_driver(); /* under a record lock it may */
    unlock(&record);
  }
  CHECK_EQ(lock_order_taken(LOCK_DEVICE), CHECKED * 3);
}

TEST(several_sleep_locks_are_held_together)
{
  init();
  lock(&sleeps);
  lock(&other_sleeps);
  lock(&device);
  unlock(&device);
  unlock(&sleeps);
  lock(&sleeps); /* the other one is still held */
  unlock(&other_sleeps);
  unlock(&sleeps);
}

static void sleep_under_device(void)
{
  init();
  lock(&sleeps);
  lock(&other_sleeps);
  unlock(&other_sleeps);
  lock(&device);
  lock(&other_sleeps);
}

/* A lock that is held, and what comes then: another one, or a call of the driver. */
static const struct violation {
  mutex_t *held, *then;
  const char *said;
} VIOLATIONS[] = {
    {&leaf, &device, "a device's lock while the thread holds the lock of the map"},
    {&device, &other_device, "a device's lock while the thread holds a device's lock"},
    {&device, NULL, "a driver call while the thread holds a device's lock"},
    {&leaf, NULL, "a driver call while the thread holds the lock of the map"},
};
static const struct violation *violation;

static void violate(void)
{
  init();
  lock(violation->held);
  if (violation->then)
    lock(violation->then);
  else
    lock_order_call_driver();
}

static void lock_without_a_rank(void)
{
  lock(&unranked);
}
static void release_what_is_not_held(void)
{
  init();
  unlock(&device);
}

TEST(a_violation_aborts_and_names_the_locks)
{
  for (violation = VIOLATIONS; violation < VIOLATIONS + 4; violation++)
    CHECK_EQ(check_aborts(violate, violation->said), CHECKED);
  CHECK_EQ(check_aborts(sleep_under_device,
                        "a device's sleep lock while the thread holds a device's lock"),
           CHECKED);
  CHECK_EQ(check_aborts(lock_without_a_rank, "a lock without a rank"), CHECKED);
  CHECK_EQ(check_aborts(release_what_is_not_held, "released that the thread does not hold"),
           CHECKED);
}

/* ---- what a malloc takes ------------------------------------------------------ */

BEGIN(WHEN_TOLD)

static unsigned long taken(lock_rank rank, size_t size, void **p)
{
  unsigned long before = lock_order_taken(rank);
  CHECK_OK(esper_malloc(w.core, size, r, p));
  return lock_order_taken(rank) - before;
}

SCENE(a_malloc_that_finds_a_use_over_takes_the_devices_lock_twice_at_most)
{
  void *p = world_malloc(&w, 64 * MIB, r), *q;
  world_kernel(&w, r, p);
  read_and_free(p, s);
  sim_run_all(w.s);
  CHECK(taken(LOCK_DEVICE, 64 * MIB, &q) <= 2);
  CHECK(q == p);
  CHECK_OK(esper_free(w.core, q));
}

SCENE(a_malloc_looks_into_the_block_cache_once)
{
  void *p, *q;
  world_free(&w, world_malloc(&w, 8 * MIB, r));
  CHECK_EQ(taken(LOCK_CACHE, 1 * MIB, &p), CHECKED); /* it misses, and splits the block */
  CHECK_OK(esper_free(w.core, p));
  CHECK_EQ(taken(LOCK_CACHE, 1 * MIB, &q), CHECKED); /* it hits */
  CHECK(q == p);
  CHECK_EQ(taken(LOCK_DEVICE, 1 * MIB, &p), CHECKED);
  CHECK_OK(esper_free(w.core, p));
  CHECK_OK(esper_free(w.core, q));
}
