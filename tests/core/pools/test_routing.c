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

SCENE(a_filter_that_fails_fails_the_malloc)
{
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, fails, NULL));
  CHECK_REFUSED(try_malloc(512, r), ESPER_INVALID, "(7, 0)");
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  world_malloc(&w, 512, r);
}

static uint64_t wanted;

static int is_wanted(void *context, void *stream)
{
  (void)stream;
  return (uint64_t)(uintptr_t)context == wanted;
}

SCENE(any_number_of_pools_is_asked)
{
  enum { MANY = 100 };
  for (uint64_t id = 1; id <= MANY; id++)
    CHECK_OK(esper_pool_begin(w.core, 0, id, 0, is_wanted, (void *)(uintptr_t)id));
  for (wanted = 1; wanted <= MANY; wanted += 33)
    CHECK_EQ(pool_of(world_malloc(&w, 512, r)), wanted);
  CHECK_OK(esper_pool_end(w.core, 0, 34, 0, NULL)); /* in the middle of the list */
  CHECK_STATUS(esper_pool_end(w.core, 0, 34, 0, NULL), ESPER_INVALID);
  wanted = 34;
  CHECK_EQ(pool_of(world_malloc(&w, 512, r)), 0);
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
SCENE(a_pool_has_ended_when_nobody_asks_its_filter_any_more)
{
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
}

static int declines_late(void *context, void *stream)
{
  answers_late(context, stream);
  return 0;
}

static void *end_pool(void *ended)
{
  CHECK_OK(esper_pool_end(w.core, 0, ID, 0, NULL));
  atomic_store((atomic_int *)ended, 1);
  return NULL;
}

/* While the newest pool's filter is asked, that pool and the one behind it end. */
SCENE(a_filter_that_has_ended_meanwhile_is_not_asked)
{
  pthread_t asker, ender;
  atomic_int answered = 0, ended = 0;
  void *p;
  atomic_store(&asked, 0);
  atomic_store(&may_answer, 0);
  CHECK_OK(esper_pool_begin(w.core, 0, ID + 1, 0, all, NULL));
  CHECK_OK(esper_pool_begin(w.core, 0, ID, 0, declines_late, &answered));
  CHECK(!pthread_create(&asker, NULL, ask, &p));
  while (!atomic_load(&asked))
    sched_yield();
  CHECK(!pthread_create(&ender, NULL, end_pool, &ended));
  while (atomic_load(&w.core->devices[0].route_count) > 1)
    sched_yield();
  CHECK_OK(esper_pool_end(w.core, 0, ID + 1, 0, NULL));
  CHECK(!atomic_load(&ended));
  atomic_store(&may_answer, 1);
  pthread_join(asker, NULL);
  pthread_join(ender, NULL);
  CHECK_EQ(pool_of(p), 0);
  CHECK_OK(esper_free(w.core, p));
}
