/* Who waits at the gate of a front, and what the ledgers keep when room is short. */
#include "../../csrc/core/blocks/cache_latch.h"

#include <pthread.h>
#include <sched.h>

#include "../../csrc/core/blocks/block.h"
#include "../../csrc/core/api/testing.h"
#include "../../csrc/core/blocks/block_cache.h"
#include "../../csrc/core/stats/stat_shard.h"
#include "../../csrc/core/blocks/map.h"
#include "../../csrc/core/pools/pool.h"
#include "../../csrc/core/order/stream.h"
#include "world.h"

/* A classic segment is no larger: each stream has memory of its own. */
enum { SIZE = 20 * MIB };

static world w;
static esper_stream r, s;
static front_t *front; /* of r */

static void begin(void)
{
  sim_options options = {.completion = SIM_AT_ONCE};
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  s = w.stream[1];
  void *p = world_malloc(&w, SIZE, r), *q[2];
  for (int i = 0; i < 2; i++)
    q[i] = world_malloc(&w, SIZE, s);
  device_t *device = &w.core->devices[0];
  front = &pool_heap(device->default_pool, stream_immortal(w.core, device, r.handle), 0)->front;
  for (int i = 0; i < 2; i++)
    world_free(&w, q[i]);
  world_free(&w, p);
  CHECK_OK(esper_reset_accumulated_stats(w.core, 0));
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  world_free(&w, world_malloc(&w, SIZE, r)); /* opens it */
}

static void end(void)
{
  world_check(&w);
  world_end(&w);
}

static esper_stat count_of_blocks(void)
{
  esper_stats stats;
  CHECK_OK(esper_get_stats(w.core, 0, &stats));
  return stats.allocation[ESPER_ALL];
}

/* ---- wishes ------------------------------------------------------------------ */

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
}

static void join_and_free(asker *a)
{
  pthread_join(a->thread, NULL);
  CHECK(a->got);
  CHECK_OK(esper_free(w.core, a->got));
}

static void hold_gate(void)
{
  lock(&w.core->devices[0].lock);
  CHECK(front_pause(front));
  unlock(&w.core->devices[0].lock);
}

static void leave_gate(void)
{
  lock(&w.core->devices[0].lock);
  front_resume(front);
  unlock(&w.core->devices[0].lock);
}

static void await_wish(void)
{
  while (atomic_load(&front->wish.state) != WISH_MADE)
    sched_yield();
}

TEST(a_malloc_that_waits_while_a_peak_rises_is_part_of_it)
{
  begin();
  asker a;
  void *others[2] = {world_malloc(&w, SIZE, s)};
  hold_gate();
  start(&a, SIZE);
  await_wish();
  others[1] = world_malloc(&w, SIZE, s); /* there is no room for it */
  CHECK_EQ(atomic_load(&front->wish.state), WISH_GRANTED);
  CHECK(wish_is_valid(&front->wish));
  block_t *granted = front->wish.block;
  block_set_state(granted, BLOCK_READY);
  CHECK(!wish_is_valid(&front->wish));
  block_set_state(granted, BLOCK_LIVE);
  CHECK_EQ(w.core->devices[0].stats.allocation[ESPER_ALL].peak, 3);
  CHECK_EQ(w.core->devices[0].stats.allocation[ESPER_ALL].current, 3);
  leave_gate();
  join_and_free(&a);
  CHECK_EQ(atomic_load(&front->wish.state), WISH_NONE);
  for (int i = 0; i < 2; i++)
    world_free(&w, others[i]);
  CHECK_EQ(count_of_blocks().peak, 3);
  CHECK_EQ(count_of_blocks().allocated, 4);
  end();
}

TEST(a_wish_that_the_front_cannot_grant_is_served_later)
{
  begin();
  asker a;
  hold_gate();
  start(&a, 2 * SIZE);
  await_wish();
  lock(&w.core->devices[0].lock);
  fronts_grant_wishes(&w.core->devices[0]);
  unlock(&w.core->devices[0].lock);
  CHECK_EQ(atomic_load(&front->wish.state), WISH_MADE);
  leave_gate();
  join_and_free(&a);
  CHECK_EQ(count_of_blocks().allocated, 2);
  CHECK_EQ(count_of_blocks().current, 0);
  end();
}

TEST(two_that_wait_at_a_gate_are_both_served)
{
  begin();
  asker a, b;
  hold_gate();
  start(&a, SIZE);
  await_wish();
  start(&b, SIZE);
  lock(&w.core->devices[0].lock);
  fronts_grant_wishes(&w.core->devices[0]); /* of the first */
  ledgers_read(&w.core->devices[0]);
  CHECK_EQ(w.core->devices[0].stats.allocation[ESPER_ALL].current, 1);
  unlock(&w.core->devices[0].lock);
  leave_gate();
  pthread_join(b.thread, NULL);
  pthread_join(a.thread, NULL);
  CHECK(a.got && b.got && a.got != b.got);
  CHECK_OK(esper_free(w.core, a.got));
  CHECK_OK(esper_free(w.core, b.got));
  CHECK_EQ(count_of_blocks().allocated, 3);
  end();
}

TEST(who_waits_at_a_gate_that_is_closed_asks_under_the_lock)
{
  begin();
  asker a;
  device_t *device = &w.core->devices[0];
  hold_gate();
  start(&a, SIZE);
  await_wish();
  lock(&device->lock);
  fronts_close(device);
  CHECK_EQ(atomic_load(&front->gate), GATE_CLOSED);
  unlock(&device->lock);
  join_and_free(&a);
  CHECK_EQ(atomic_load(&front->wish.state), WISH_NONE);
  CHECK_EQ(count_of_blocks().current, 0);
  end();
}

/* A heap goes when its memory gets another home; a free that was on its way to it comes to
 * the gate of a spare heap, or of what that has become. */
static void *try_gate(void *over)
{
  while (!atomic_load((atomic_bool *)over))
    CHECK(!gate_take(front, GATE_HELD));
  return NULL;
}

TEST(the_gate_of_a_heap_stays_closed_while_it_becomes_another)
{
  enum { TIMES = 2000 };
  begin();
  pthread_t thread;
  atomic_bool over = false;
  device_t *device = &w.core->devices[0];
  stream_t *stream = stream_immortal(w.core, device, r.handle);
  esper_pool *pool;
  CHECK_OK(esper_pool_create(w.core, 0, 7, 0, &pool));
  lock(&device->lock);
  heap_t *heap = pool_heap(pool, stream, 0);
  unlock(&device->lock);
  front = &heap->front;
  CHECK(!pthread_create(&thread, NULL, try_gate, &over));
  for (int i = 0; i < TIMES; i++) {
    lock(&device->lock);
    heap->borrowed = 1;
    pool_destroy_heap(heap);
    CHECK(pool_heap(pool, stream, 0) == heap && !heap->borrowed);
    unlock(&device->lock);
  }
  atomic_store(&over, true);
  pthread_join(thread, NULL);
  end();
}

/* ---- short room -------------------------------------------------------------- */

/* Two streams take turns with all blocks that the peak allows: what one keeps of the
 * room, the other lacks. */
TEST(who_was_stopped_for_room_keeps_none_for_a_while)
{
  enum { BLOCKS = 8, TURNS = 100 };
  begin();
  void *p[BLOCKS], *q[BLOCKS];
  for (int k = 0; k < BLOCKS; k++)
    p[k] = world_malloc(&w, SIZE, r);
  for (int k = 0; k < BLOCKS; k++)
    q[k] = world_malloc(&w, SIZE, s);
  for (int k = 0; k < BLOCKS; k++)
    world_free(&w, p[k]);
  for (int k = 0; k < BLOCKS; k++)
    world_free(&w, q[k]);
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  const esper_stat *known = &w.core->devices[0].stats.allocation[ESPER_ALL];
  int64_t told = 0;
  int stops = 0;
  for (int i = 0; i < 2 * TURNS; i++) {
    for (int k = 0; k < BLOCKS; k++)
      p[k] = world_malloc(&w, SIZE, i % 2 ? r : s);
    for (int k = 0; k < BLOCKS; k++)
      world_free(&w, p[k]);
    stops += i > 2 && known->allocated != told; /* some malloc read the ledgers */
    told = known->allocated;
  }
  CHECK(stops >= 1 && stops <= 20);
  CHECK_EQ(count_of_blocks().peak, BLOCKS);
  end();
}

static int64_t sum_of_peaks(void)
{
  const esper_stats *stats = &w.core->devices[0].stats;
  int64_t sum = 0;
  for (int class = 0; class < ESPER_CLASSES; class++)
    sum += stats->allocation[class].peak + stats->allocated_bytes[class].peak +
           stats->active[class].peak + stats->active_bytes[class].peak +
           stats->requested_bytes[class].peak;
  return sum;
}

/* The room for blocks, for their bytes and for what was asked for do not end together. */
TEST(a_single_stream_stops_for_room_only_where_a_peak_rises)
{
  enum { LIVE = 64, CHANGES = 20000 };
  begin();
  void *p[LIVE] = {0};
  uint64_t state = 1;
  const esper_stat *known = &w.core->devices[0].stats.allocation[ESPER_ALL];
  int64_t told = known->allocated, peaks = sum_of_peaks();
  for (int i = 0; i < CHANGES; i++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    int k = (int)(state >> 33) % LIVE;
    if (p[k])
      world_free(&w, p[k]);
    p[k] = i % 5 ? world_malloc(&w, 1 + (state >> 40) % (4 * MIB), r) : NULL;
    if (known->allocated != told)
      CHECK(sum_of_peaks() > peaks);
    told = known->allocated;
    peaks = sum_of_peaks();
  }
  for (int k = 0; k < LIVE; k++)
    world_free(&w, p[k]);
  end();
}
