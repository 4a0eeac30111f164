/* Waiting for the latch of a block cache. */
#include "core/blocks/cache_latch.h"

#include <pthread.h>
#include <sched.h>

#include "core/blocks/block.h"
#include "core/blocks/block_cache.h"
#include "core/pools/pool.h"
#include "core/order/stream.h"
#include "one_world.h"
#include "core/blocks/free_blocks.h"

/* A classic segment is no larger: each stream has memory of its own. */
enum { SIZE = 20 * MIB };

static block_cache_t *cache; /* of r */

static void begin(void)
{
  begin_on((sim_options){.completion = SIM_AT_ONCE}, NULL);
  void *p = world_malloc(&w, SIZE, r), *q[2];
  for (int i = 0; i < 2; i++)
    q[i] = world_malloc(&w, SIZE, s);
  device_t *device = &w.core->devices[0];
  cache = &pool_find_or_make_heap(device->default_pool, stream_immortal(w.core, device, r.handle),
                                  0, TAG_NONE)
               ->cache;
  for (int i = 0; i < 2; i++)
    world_free(&w, q[i]);
  world_free(&w, p);
  CHECK_OK(esper_reset_accumulated_stats(w.core, 0));
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  world_free(&w, world_malloc(&w, SIZE, r)); /* opens it */
}

static esper_stat count_of_blocks(void)
{
  esper_stats stats;
  CHECK_OK(esper_get_stats(w.core, 0, &stats));
  return stats.allocation[ESPER_ALL];
}

/* ---- waiting ----------------------------------------------------------------- */

typedef struct asker {
  pthread_t thread;
  size_t size;
  void *got;
} asker;

static void *ask(void *argument)
{
  asker *a = argument;
  CHECK_OK(esper_malloc(w.core, a->size, r, &a->got));
  return NULL;
}

static void start(asker *a, size_t size)
{
  *a = (asker){.size = size};
  CHECK(!pthread_create(&a->thread, NULL, ask, a));
  for (int i = 0; i < 100; i++)
    sched_yield(); /* it is likely to wait at the latch by then */
}

static void pause(void)
{
  lock(&w.core->devices[0].lock);
  cache_pause(cache);
  unlock(&w.core->devices[0].lock);
}

static void resume(void)
{
  lock(&w.core->devices[0].lock);
  cache_resume(cache);
  unlock(&w.core->devices[0].lock);
}

SCENE(mallocs_that_wait_at_a_latch_are_served_when_it_opens)
{
  asker a, b;
  pause();
  CHECK_EQ(atomic_load(&cache->latch), LATCH_HELD);
  start(&a, SIZE);
  start(&b, SIZE);
  CHECK(cache->filled); /* nobody takes a block meanwhile */
  resume();
  pthread_join(b.thread, NULL);
  pthread_join(a.thread, NULL);
  CHECK(a.got && b.got && a.got != b.got);
  CHECK_OK(esper_free(w.core, a.got));
  CHECK_OK(esper_free(w.core, b.got));
  CHECK_EQ(count_of_blocks().allocated, 3);
  CHECK_EQ(count_of_blocks().current, 0);
}

/* A heap goes when its memory gets another home; a free that was on its way to it comes to
 * the latch of a spare heap, or of what that has become. */
static void *try_latch(void *over)
{
  while (!atomic_load((atomic_bool *)over))
    CHECK(!cache_enter(cache, LATCH_HELD));
  return NULL;
}

SCENE(the_latch_of_a_heap_stays_closed_while_it_becomes_another)
{
  enum { TIMES = 2000 };
  pthread_t thread;
  atomic_bool over = false;
  device_t *device = &w.core->devices[0];
  stream_t *stream = stream_immortal(w.core, device, r.handle);
  esper_pool *pool = world_pool(&w, 0, 7, 0);
  lock(&device->lock);
  heap_t *heap = pool_find_or_make_heap(pool, stream, 0, TAG_NONE);
  unlock(&device->lock);
  cache = &heap->cache;
  CHECK(!pthread_create(&thread, NULL, try_latch, &over));
  for (int i = 0; i < TIMES; i++) {
    lock(&device->lock);
    heap->borrowed = 1;
    pool_destroy_heap(heap);
    CHECK(pool_find_or_make_heap(pool, stream, 0, TAG_NONE) == heap && !heap->borrowed);
    unlock(&device->lock);
  }
  atomic_store(&over, true);
  pthread_join(thread, NULL);
}
