/* Which pool serves a malloc: the filters of the pools that were begun. */
#include "core/pools/routing.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "core/pools/pool.h"
#include "graph_pools.h"

static int fails(void *context, void *stream)
{
  (void)context, (void)stream;
  return -1;
}

/* The pool that a live block belongs to. */
static uint64_t pool_of(const void *p)
{
  esper_snapshot snapshot;
  uint64_t id = UINT64_MAX;
  CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
  for (size_t i = 0; i < snapshot.segment_count; i++)
    if ((uintptr_t)p - snapshot.segments[i].address < snapshot.segments[i].size)
      id = snapshot.segments[i].pool[0];
  esper_snapshot_free(&snapshot);
  return id;
}

TEST(a_filter_that_fails_fails_the_malloc)
{
  begin();
  void *p;
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, fails, NULL));
  CHECK_STATUS(esper_malloc(w.core, 512, r, &p), ESPER_INVALID);
  CHECK(strstr(esper_last_error(), "(7, 0)"));
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  world_malloc(&w, 512, r);
  end();
}

TEST(a_route_is_counted_from_its_reservation_to_its_end)
{
  begin();
  device_t *device = &w.core->devices[0];
  for (uint64_t id = 1; id <= ROUTES; id++) {
    CHECK(route_is_free(device));
    CHECK_OK(esper_pool_begin(w.core, 0, id, 0, all, NULL));
  }
  CHECK(!route_is_free(device));
  CHECK_OK(esper_pool_end(w.core, 0, ROUTES / 2, 0, NULL)); /* in the middle of the list */
  CHECK(route_is_free(device));
  CHECK_STATUS(esper_pool_end(w.core, 0, ROUTES / 2, 0, NULL), ESPER_INVALID);
  route_reserve(device);
  CHECK(!route_is_free(device));
  atomic_fetch_sub(&device->route_count, 1);
  end();
}

/* ---- several threads ---------------------------------------------------------- */

static atomic_int asked, may_answer;

static int answers_late(void *context, void *stream)
{
  (void)stream;
  atomic_store(&asked, 1);
  while (!atomic_load(&may_answer))
    sched_yield();
  for (int i = 0; i < 100; i++)
    sched_yield(); /* a pool_end that does not wait is likely to be over by then */
  atomic_store((atomic_int *)context, 1);
  return 1;
}

static void *ask(void *got)
{
  CHECK_OK(esper_malloc(w.core, 512, r, got));
  return NULL;
}

/* The program may throw away what the filter needs. */
TEST(a_pool_has_ended_when_nobody_asks_its_filter_any_more)
{
  begin();
  pthread_t thread;
  atomic_int answered = 0;
  void *p, *context;
  atomic_store(&asked, 0);
  atomic_store(&may_answer, 0);
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, answers_late, &answered));
  CHECK(!pthread_create(&thread, NULL, ask, &p));
  while (!atomic_load(&asked))
    sched_yield();
  atomic_store(&may_answer, 1);
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, &context));
  CHECK(context == &answered && atomic_load(&answered));
  pthread_join(thread, NULL);
  CHECK_EQ(pool_of(p), ID);
  CHECK_OK(esper_free(w.core, p));
  end();
}
