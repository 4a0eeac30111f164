/* The block cache of a heap: malloc and free without the device's lock, its figures, and several
 * threads at once. */
#include "core/blocks/block_cache.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "core/api/checkpoint.h"
#include "core/api/testing.h"
#include "core/stats/stat_shard.h"
#include "core/blocks/map.h"
#include "core/pools/pool.h"
#include "core/order/stream.h"
#include "world.h"

static world w;
static esper_stream r, s;

static void begin_with(sim_options options)
{
  world_begin_with(&w, &options, NULL);
  r = w.stream[0];
  s = w.stream[1];
}

static void begin(void)
{
  begin_with((sim_options){.completion = SIM_AT_ONCE});
}

/* The same with mapped segments, on a device of 256 MiB. */
static void begin_on_pages(void)
{
  begin_with((sim_options){.completion = SIM_AT_ONCE,
                           .oracle = SIM_ORACLE_KNOWN,
                           .virtual_memory = 1,
                           .capacity = 256 * MIB});
}

static void end(void)
{
  world_check(&w);
  world_end(&w);
}

static heap_t *heap_of(esper_stream stream)
{
  device_t *device = &w.core->devices[stream.device];
  return pool_heap(device->default_pool, stream_immortal(w.core, device, stream.handle), 0);
}

/* Blocks in the cache; -1: it is not open. */
static int kept(esper_stream stream)
{
  block_cache_t *cache = &heap_of(stream)->cache;
  int count = 0;
  bool open = cache->state == CACHE_OPEN;
  cache_pause(cache);
  for (int i = 0; i < CACHE_SLOTS; i++)
    count += cache->count[i];
  cache_resume(cache);
  return open ? count : -1;
}

/* ---- what it keeps ---------------------------------------------------------- */

TEST(what_was_freed_is_handed_out_again_and_nobody_is_asked)
{
  begin();
  void *p = world_malloc(&w, 3 * MIB, r);
  world_free(&w, p);
  CHECK_EQ(kept(r), 1);
  device_t *device = &w.core->devices[0];
  for (int i = 0; i < 100; i++) {
    lock(&device->lock); /* which neither call takes */
    CHECK_OK(esper_malloc(w.core, 3 * MIB - 100, r, &p));
    CHECK_OK(esper_free(w.core, p));
    unlock(&device->lock);
  }
  CHECK_EQ(kept(r), 1);
  esper_stats stats = world_stats(&w, 0);
  CHECK_EQ(stats.allocation[ESPER_ALL].allocated, 101);
  CHECK_EQ(stats.allocation[ESPER_ALL].freed, 101);
  CHECK_EQ(stats.allocation[ESPER_ALL].peak, 1);
  CHECK_EQ(stats.requested_bytes[ESPER_LARGE].allocated, 303 * MIB - 10000);
  CHECK_EQ(stats.active_bytes[ESPER_LARGE].peak, 3 * MIB);
  end();
}

TEST(a_miss_merges_what_was_kept)
{
  begin();
  void *p[8];
  for (int i = 0; i < 8; i++)
    p[i] = world_malloc(&w, 256 * KIB, r);
  for (int i = 0; i < 8; i++)
    world_free(&w, p[i]);
  CHECK_EQ(kept(r), 8);
  void *all = world_malloc(&w, MIB, r);
  CHECK(all == p[0]);
  CHECK_EQ(kept(r), 0);
  end();
}

TEST(many_blocks_of_a_size_are_kept_and_then_none)
{
  begin();
  enum { MANY = 200 };
  void *p[MANY];
  for (int i = 0; i < MANY; i++)
    p[i] = world_malloc(&w, 512, r);
  for (int i = 0; i < MANY; i++) {
    world_free(&w, p[i]);
    CHECK(kept(r) >= 1 && kept(r) <= CACHE_DEPTH);
    CHECK(esper_core_is_valid(w.core));
  }
  end();
}

TEST(other_streams_get_what_is_kept)
{
  begin();
  void *p = world_malloc(&w, 30 * MIB, r);
  world_free(&w, p);
  CHECK_EQ(kept(r), 1);
  CHECK(world_malloc(&w, 30 * MIB, s) == p); /* r did nothing with it */
  CHECK_EQ(kept(r), -1);
  end();
}

TEST(what_is_kept_goes_back_to_the_driver)
{
  begin();
  world_free(&w, world_malloc(&w, 30 * MIB, r));
  CHECK_EQ(kept(r), 1);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  end();
}

TEST(a_marked_block_a_lent_one_and_a_captured_one_are_not_kept)
{
  begin();
  void *p = world_malloc(&w, 12 * MIB, r), *q = world_malloc(&w, 12 * MIB, r);
  world_use(&w, p, s, 0);
  world_free(&w, p);
  CHECK_EQ(kept(r), 0);
  world_free(&w, q);
  CHECK_EQ(kept(r), 1);
  void *a = world_malloc(&w, 2 * MIB, r), *b = world_malloc(&w, 2 * MIB, r);
  world_free(&w, a);
  esper_retire(w.core, 0);
  esper_set_memory_fraction(w.core, 0, 0.001);
  CHECK(world_malloc(&w, 2 * MIB, s) == a);
  world_free(&w, a);
  CHECK(kept(r) <= 0);
  world_free(&w, b);
  end();
}

TEST(freeing_twice_is_an_error)
{
  begin();
  void *p = world_malloc(&w, MIB, r);
  world_free(&w, p);
  CHECK_STATUS(esper_free(w.core, p), ESPER_INVALID);
  CHECK_EQ(kept(r), 1);
  end();
}

/* The map is read without a lock: the segment may go before the block is looked at. */
TEST(freeing_twice_is_an_error_beside_a_release)
{
  begin();
  void *p = world_malloc(&w, 30 * MIB, r);
  block_t *block = map_find(w.core->map, (uintptr_t)p); /* as far as the second free got */
  world_free(&w, p);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK(!cache_free(block, (uintptr_t)p));
  device_t *device = &w.core->devices[0];
  lock(&device->lock);
  CHECK(!cache_claim_live(block, (uintptr_t)p)); /* as when it waited for the lock */
  unlock(&device->lock);
  CHECK_STATUS(esper_free(w.core, p), ESPER_INVALID);
  end();
}

TEST(while_actions_are_traced_none_is_missed)
{
  begin();
  void *p = world_malloc(&w, MIB, r);
  world_free(&w, p);
  CHECK_OK(esper_trace_start(w.core, 100));
  for (int i = 0; i < 3; i++) {
    p = world_malloc(&w, MIB, r);
    world_free(&w, p);
    CHECK_EQ(kept(r), -1);
  }
  esper_trace_entry *entries;
  size_t count;
  CHECK_OK(esper_trace_copy(w.core, 0, &entries, &count));
  CHECK_EQ(count, 9); /* alloc, free_requested, free_completed */
  free(entries);
  CHECK_OK(esper_trace_start(w.core, 0));
  p = world_malloc(&w, MIB, r);
  world_free(&w, p);
  CHECK_EQ(kept(r), 1);
  end();
}

static size_t told;

static void hear(void *context, const esper_trace_entry *entry)
{
  (void)context, (void)entry;
  told++;
}

TEST(who_watches_is_told_of_everything)
{
  begin();
  world_free(&w, world_malloc(&w, MIB, r));
  esper_trace_watch(w.core, hear, NULL);
  told = 0;
  for (int i = 0; i < 3; i++)
    world_free(&w, world_malloc(&w, MIB, r));
  CHECK_EQ(told, 9);
  esper_trace_watch(w.core, NULL, NULL);
  world_free(&w, world_malloc(&w, MIB, r));
  CHECK_EQ(told, 9);
  CHECK_EQ(kept(r), 1);
  end();
}

/* Where addresses repeat from run to run: test_malloc_deterministic.c. */
TEST(a_private_pool_has_no_front)
{
  begin();
  esper_pool *pool;
  void *p, *q, *again;
  CHECK_OK(esper_pool_create(w.core, 0, 7, 0, &pool));
  CHECK_OK(esper_malloc_from(w.core, pool, 3 * MIB, r, &p));
  CHECK_OK(esper_malloc_from(w.core, pool, 3 * MIB, r, &q));
  CHECK_OK(esper_free(w.core, q));
  CHECK_OK(esper_free(w.core, p));
  CHECK(!pool->heaps->cache.filled && cache_is_closed(&pool->heaps->cache));
  CHECK_OK(esper_malloc_from(w.core, pool, 6 * MIB, r, &again));
  CHECK(again == p);
  CHECK_OK(esper_free(w.core, p));
  CHECK(esper_core_is_valid(w.core));
  end();
}

TEST(what_is_kept_of_a_pinned_segment_stays_there)
{
  begin();
  void *p = world_malloc(&w, 30 * MIB, r), *segment;
  CHECK_OK(esper_pin(w.core, p, &segment));
  world_free(&w, p);
  CHECK_EQ(kept(r), 1);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 30 * MIB);
  world_free(&w, world_malloc(&w, 30 * MIB, r));
  CHECK_EQ(kept(r), 1);
  CHECK_OK(esper_unpin(w.core, segment)); /* nothing of it is live */
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(world_stats(&w, 0).reserved_bytes[ESPER_ALL].current, 0);
  end();
}

static esper_stats figures(void)
{
  return world_stats(&w, 0);
}

/* ---- what it keeps lies on pages ---------------------------------------------- */

static int64_t reserved(void)
{
  return figures().reserved_bytes[ESPER_ALL].current / (int64_t)MIB;
}

static void *written(size_t size, esper_stream stream)
{
  void *p = world_malloc(&w, size, stream);
  world_kernel(&w, stream, p);
  return p;
}

/* Blocks of 4 MiB, every other one free and in the stream's block cache. */
static void keep_every_other(void **p, int count, esper_stream stream)
{
  for (int i = 0; i < count; i++)
    p[i] = written(4 * MIB, stream);
  for (int i = 0; i < count; i += 2)
    world_free(&w, p[i]);
  CHECK_EQ(kept(stream), count / 2);
}

TEST(pages_of_what_is_kept_are_lent_and_it_is_kept_no_more)
{
  begin_on_pages();
  void *p[8];
  for (int own = 0; own < 2; own++) {
    esper_stream to = own ? w.stream[3] : r, from = own ? to : s;
    keep_every_other(p, 8, from);
    int64_t before = reserved();
    written(16 * MIB, to);
    CHECK_EQ(reserved(), before);
    CHECK(kept(from) <= 0);
    for (int i = 0; i < 4; i++)
      written(4 * MIB, from);
    CHECK_EQ(reserved(), before + 16); /* where they were there was nothing to be had */
    world_check(&w);
  }
  end();
}

TEST(pages_of_what_is_kept_go_back_to_the_driver)
{
  begin_on_pages();
  void *p[8];
  keep_every_other(p, 8, r);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 16);
  for (int i = 0; i < 4; i++)
    written(4 * MIB, r);
  CHECK_EQ(reserved(), 32);
  end();
}

/* A hole is filled by what one of its neighbours misses, also if that is in the block cache. */
TEST(a_heap_grows_by_what_the_kept_blocks_beside_a_hole_miss)
{
  begin_on_pages();
  void *p = written(4 * MIB, r), *q = written(4 * MIB, r);
  world_free(&w, q);
  CHECK_EQ(kept(r), 1);
  CHECK(written(20 * MIB, r) == q);
  CHECK_EQ(reserved(), 24);
  world_free(&w, p);
  end();
}

TEST(what_is_kept_on_pages_is_handed_out_and_nobody_is_asked)
{
  begin_on_pages();
  world_free(&w, written(4 * MIB, r));
  device_t *device = &w.core->devices[0];
  uint64_t calls = sim_calls(w.s, SIM_CALL_any), queries = sim_calls(w.s, SIM_CALL_stream_capture);
  for (int i = 0; i < 100; i++) {
    void *p;
    lock(&device->lock);
    CHECK_OK(esper_malloc(w.core, 4 * MIB, r, &p));
    CHECK_OK(esper_free(w.core, p));
    unlock(&device->lock);
  }
  CHECK_EQ(sim_calls(w.s, SIM_CALL_any) - calls, sim_calls(w.s, SIM_CALL_stream_capture) - queries);
  CHECK_EQ(reserved(), 4);
  end();
}

TEST(a_peak_of_several_streams_is_their_sum)
{
  begin();
  void *p[WORLD_STREAMS];
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < WORLD_STREAMS; i++) {
      p[i] = world_malloc(&w, (size_t)(i + 1) * 64 * KIB, w.stream[i]);
      world_free(&w, p[i]);
    }
    CHECK_EQ(figures().active_bytes[ESPER_ALL].peak, 8 * 64 * KIB);
    CHECK_EQ(figures().allocation[ESPER_ALL].peak, 1);
  }
  for (int i = 0; i < WORLD_STREAMS; i++)
    p[i] = world_malloc(&w, (size_t)(i + 1) * 64 * KIB, w.stream[i]);
  CHECK_EQ(figures().active_bytes[ESPER_ALL].peak, 36 * 64 * KIB);
  for (int i = 0; i < WORLD_STREAMS; i++)
    world_free(&w, p[i]);
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  CHECK_EQ(figures().active_bytes[ESPER_ALL].peak, 0);
  p[0] = world_malloc(&w, 64 * KIB, r);
  CHECK_EQ(figures().active_bytes[ESPER_ALL].peak, 64 * KIB);
  world_free(&w, p[0]);
  end();
}

static void fill(void **p, int count, esper_stream stream)
{
  for (int i = 0; i < count; i++)
    p[i] = world_malloc(&w, 4 * KIB, stream);
}

static void clear(void **p, int count)
{
  for (int i = 0; i < count; i++)
    world_free(&w, p[i]);
}

TEST(what_one_stream_gives_up_another_takes_and_nobody_is_stopped)
{
  begin();
  void *mine[48], *others[48], *one;
  fill(mine, 48, r); /* both have memory of their own */
  fill(others, 48, s);
  clear(mine, 48);
  clear(others, 48);
  CHECK_OK(esper_reset_peak_stats(w.core, 0));
  fill(mine, 48, r);
  clear(mine, 48);
  const esper_stat *known = &w.core->devices[0].stats.allocation[ESPER_ALL];
  int64_t before = known->allocated;
  fill(others, 16, s);
  CHECK_EQ(known->allocated, before); /* no shard was read */
  fill(others + 16, 32, s);
  CHECK_EQ(figures().allocation[ESPER_ALL].peak, 48);
  one = world_malloc(&w, 4 * KIB, r);
  CHECK_EQ(figures().allocation[ESPER_ALL].peak, 49);
  world_free(&w, one);
  clear(others, 48);
  CHECK_EQ(figures().allocation[ESPER_ALL].current, 0);
  end();
}

TEST(mistakes_in_a_front_or_ledger_are_noticed)
{
  begin();
  void *p = world_malloc(&w, MIB, r);
  world_free(&w, p);
  heap_t *heap = heap_of(r);
  block_cache_t *cache = &heap->cache;
  CHECK(cache_is_valid(heap));
  int slot = __builtin_ctz(cache->filled);
  block_t *block = cache->block[slot][0];
  block->counted_active = true;
  CHECK(!cache_is_valid(heap));
  block->counted_active = false;
  cache->units[slot]++;
  CHECK(!cache_is_valid(heap));
  cache->units[slot]--;
  cache->filled = 0;
  CHECK(!cache_is_valid(heap));
  cache->filled = (uint16_t)(1u << slot);
  CHECK(shards_are_valid(&w.core->devices[0]));
  cache->shard.granted[ESPER_ALL].bytes += MIB;
  CHECK(!shards_are_valid(&w.core->devices[0]));
  cache->shard.granted[ESPER_ALL].bytes -= MIB;
  w.core->devices[0].credit.pools[0].left[ESPER_ALL].bytes += MIB;
  CHECK(!shards_are_valid(&w.core->devices[0]));
  w.core->devices[0].credit.pools[0].left[ESPER_ALL].bytes -= MIB;
  end();
}

/* ---- several threads --------------------------------------------------------- */

enum { THREADS = 4, TURNS = 4000, SHELF = 16 };

static _Atomic(void *) shelf[SHELF]; /* blocks on their way to another thread */
static atomic_bool running;

static uint64_t next(uint64_t *state)
{
  uint64_t x = *state += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  return x ^ x >> 31;
}

/* Blocks of a few sizes, on its own stream and on a common one; freed by whoever
 * finds them. */
static void *work(void *argument)
{
  uint64_t state = (uint64_t)(uintptr_t)argument;
  int self = (int)(state % THREADS);
  static const size_t SIZES[] = {512, 512, 4096, 4096, MIB, 3 * MIB, 300 * KIB};
  for (int i = 0; i < TURNS; i++) {
    uint64_t x = next(&state);
    void *p;
    esper_stream stream = w.stream[x % 8 ? self : THREADS];
    CHECK_OK(esper_malloc(w.core, SIZES[x / 8 % 7], stream, &p));
    CHECK_OK(esper_free(w.core, atomic_exchange(&shelf[x / 64 % SHELF], p)));
  }
  return NULL;
}

static void *look(void *argument)
{
  (void)argument;
  esper_stats stats;
  esper_snapshot snapshot;
  while (atomic_load(&running)) {
    CHECK(esper_core_is_valid(w.core));
    CHECK_OK(esper_get_stats(w.core, 0, &stats));
    CHECK(stats.active_bytes[ESPER_ALL].current <= stats.active_bytes[ESPER_ALL].peak);
    CHECK(stats.allocation[ESPER_ALL].current >= 0 &&
          stats.allocation[ESPER_ALL].current <= SHELF + THREADS);
    CHECK_EQ(stats.active_bytes[ESPER_ALL].current,
             stats.active_bytes[ESPER_SMALL].current + stats.active_bytes[ESPER_LARGE].current);
    CHECK_OK(esper_snapshot_take(w.core, 0, &snapshot));
    size_t live = 0;
    for (size_t i = 0; i < snapshot.block_count; i++)
      live += snapshot.blocks[i].state == ESPER_BLOCK_ALLOCATED;
    CHECK(live <= SHELF + THREADS);
    esper_snapshot_free(&snapshot);
  }
  return NULL;
}

/* Pages go back and come again under those who work. */
static void *look_and_empty(void *argument)
{
  while (atomic_load(&running)) {
    CHECK_OK(esper_empty_cache(w.core, 0, NULL));
    CHECK(esper_core_is_valid(w.core));
    sched_yield();
  }
  return look(argument);
}

/* As work(), of sizes that leave holes, so that pages move. */
static void *work_on_pages(void *argument)
{
  uint64_t state = (uint64_t)(uintptr_t)argument;
  int self = (int)(state % THREADS);
  for (int i = 0; i < TURNS; i++) {
    uint64_t x = next(&state);
    void *p;
    size_t size = x % 3 ? (x / 8 % 3 + 1) * 2 * MIB : (x / 8 % 12 + 1) * MIB;
    CHECK_OK(esper_malloc(w.core, size, w.stream[x % 5 ? self : THREADS], &p));
    CHECK_OK(esper_free(w.core, atomic_exchange(&shelf[x / 64 % SHELF], p)));
  }
  return NULL;
}

static esper_pool *pool;

/* As work(), in a pool. */
static void *work_in_pool(void *argument)
{
  uint64_t state = (uint64_t)(uintptr_t)argument;
  int self = (int)(state % THREADS);
  for (int i = 0; i < TURNS; i++) {
    uint64_t x = next(&state);
    void *p;
    CHECK_OK(esper_malloc_from(w.core, pool, x % 3 ? 4096 : MIB, w.stream[self], &p));
    CHECK_OK(esper_free(w.core, atomic_exchange(&shelf[x / 64 % SHELF], p)));
  }
  return NULL;
}

static void *write_down(void *argument)
{
  (void)argument;
  while (atomic_load(&running)) {
    esper_checkpoint *checkpoint;
    CHECK_OK(esper_checkpoint_take(w.core, 0, 7, 0, &checkpoint));
    CHECK(checkpoint_is_valid(checkpoint));
    size_t live = 0;
    for (size_t i = 0; i < checkpoint->part_count; i++)
      live += checkpoint->parts[i].live;
    CHECK(live <= SHELF + THREADS);
    esper_checkpoint_free(checkpoint);
  }
  return NULL;
}

static void free_shelf(void)
{
  for (int i = 0; i < SHELF; i++)
    CHECK_OK(esper_free(w.core, atomic_exchange(&shelf[i], NULL)));
}

/* `looker` may be NULL: nobody looks on. */
static void run_threads(void *worker(void *), void *looker(void *))
{
  pthread_t threads[THREADS + 1];
  atomic_store(&running, true);
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_create(&threads[i], NULL, worker, (void *)(uintptr_t)(100 * THREADS + i)));
  if (looker)
    CHECK(!pthread_create(&threads[THREADS], NULL, looker, NULL));
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  atomic_store(&running, false);
  if (looker)
    pthread_join(threads[THREADS], NULL);
}

TEST(threads_hand_memory_to_each_other)
{
  begin();
  run_threads(work, NULL);
  CHECK(esper_core_is_valid(w.core));
  esper_stats stats = figures();
  CHECK_EQ(stats.allocation[ESPER_ALL].allocated, THREADS * TURNS);
  CHECK(stats.allocation[ESPER_ALL].peak <= SHELF + THREADS);
  CHECK(stats.allocation[ESPER_ALL].peak >= SHELF);
  free_shelf();
  CHECK_EQ(figures().active_bytes[ESPER_ALL].current, 0);
  end();
}

TEST(figures_and_snapshots_are_right_meanwhile)
{
  begin();
  run_threads(work, look);
  free_shelf();
  CHECK_EQ(figures().allocation[ESPER_ALL].freed, THREADS * TURNS);
  end();
}

TEST(and_on_pages_that_move_meanwhile)
{
  begin_on_pages();
  run_threads(work_on_pages, look_and_empty);
  CHECK(sim_calls(w.s, SIM_CALL_page_unmap) > 0);
  free_shelf();
  CHECK_EQ(figures().allocation[ESPER_ALL].freed, THREADS * TURNS);
  CHECK_EQ(figures().active_bytes[ESPER_ALL].current, 0);
  CHECK_OK(esper_empty_cache(w.core, 0, NULL));
  CHECK_EQ(reserved(), 0);
  end();
}

TEST(checkpoints_are_of_one_moment_meanwhile)
{
  begin();
  CHECK_OK(esper_pool_create(w.core, 0, 7, 0, &pool));
  run_threads(work_in_pool, write_down);
  free_shelf();
  CHECK_EQ(figures().active_bytes[ESPER_ALL].current, 0);
  CHECK_OK(esper_pool_release(w.core, 0, 7, 0));
  end();
}

/* One block a thread: the peak cannot be more than all at once. */
static void *pairs(void *argument)
{
  int self = (int)(intptr_t)argument;
  for (int i = 0; i < TURNS; i++) {
    void *p;
    CHECK_OK(esper_malloc(w.core, 4096, w.stream[self], &p));
    CHECK_OK(esper_free(w.core, p));
  }
  return NULL;
}

TEST(peaks_of_threads_with_a_block_each_are_no_more_than_that)
{
  begin();
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++)
    CHECK(!pthread_create(&threads[i], NULL, pairs, (void *)(intptr_t)i));
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
  esper_stats stats = figures();
  CHECK_EQ(stats.allocation[ESPER_ALL].allocated, THREADS * TURNS);
  CHECK(stats.allocation[ESPER_ALL].peak >= 1 && stats.allocation[ESPER_ALL].peak <= THREADS);
  CHECK_EQ(stats.allocated_bytes[ESPER_ALL].peak, stats.allocation[ESPER_ALL].peak * 4096);
  /* What was lent stays active for a moment after its free. */
  CHECK(stats.active[ESPER_ALL].peak >= stats.allocation[ESPER_ALL].peak);
  CHECK_EQ(stats.active_bytes[ESPER_ALL].peak, stats.active[ESPER_ALL].peak * 4096);
  end();
}
