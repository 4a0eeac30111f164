/* The statistics shards of a device's heaps, and the lists of a heap. */
#include "core/blocks/heap.h"

#include "made_blocks.h"

/* ---- the lists of a heap ---------------------------------------------------------- */

TEST(a_broken_heap_is_noticed)
{
  BEGIN_MADE(4, 4, 4, 4, 4, 4);
  for (int i = 0; i < 5; i += 2) {
    owe(made[i], s, 0);
    free_blocks_add(made[i]);
  }
  CHECK(heap_is_valid(heap));
  CHECK(heap->oldest_pending == made[0] && heap->newest_pending == made[4]);
  made[2]->state = BLOCK_READY;
  CHECK(!heap_is_valid(heap));
  made[2]->state = BLOCK_PENDING;
  made[4]->older = made[0];
  CHECK(!heap_is_valid(heap));
  made[4]->older = made[2];
  heap->newest_pending = made[2];
  CHECK(!heap_is_valid(heap));
  made[2]->newer = NULL; /* the last one is in its bin alone */
  CHECK(!heap_is_valid(heap));
  made[2]->newer = made[4];
  heap->newest_pending = made[4];
  heap->oldest_pending = made[2];
  CHECK(!heap_is_valid(heap));
  heap->oldest_pending = made[0];
  segment.heap = heap_of(s);
  CHECK(!heap_is_valid(heap));
  segment.heap = heap;
  heap->ready[0].count++;
  CHECK(!heap_is_valid(heap));
  heap->ready[0].count--;
  end_made();
}

/* ---- statistics shards ------------------------------------------------------------- */

static device_t *first_device(void)
{
  return &w.core->devices[0];
}

static int64_t credit_in_pools(void)
{
  int64_t bytes = 0;
  for (int i = 0; i < CREDIT_POOLS; i++)
    bytes += first_device()->credit.pools[i].left[ESPER_ALL].bytes;
  return bytes;
}

SCENE(credit_reaches_up_to_the_peak)
{
  void *p = world_malloc(&w, 256 * KIB, r), *q = world_malloc(&w, 64 * KIB, r);
  world_free(&w, q);
  block_t like = {.size = 64 * KIB, .requested = 60 * KIB};
  segment_t small = {.heap = heap_of(r)};
  like.segment = &small;
  lock(&first_device()->lock);
  caches_pause(first_device());
  shards_read(first_device());
  CHECK_EQ(credit_in_pools(), 0);
  shards_grant(first_device(), NULL);
  CHECK_EQ(credit_in_pools(), 64 * KIB);
  CHECK_EQ(heap_of(r)->cache.shard.credit[ESPER_ALL].bytes, 0);
  shards_read(first_device());
  shards_grant(first_device(), &like); /* the first goes to the heap */
  CHECK_EQ(credit_in_pools(), 0);
  CHECK_EQ(heap_of(r)->cache.shard.credit[ESPER_ALL].bytes, 64 * KIB);
  CHECK(shards_are_valid(first_device()));
  like.size = 128 * KIB; /* more than there is */
  shards_read(first_device());
  shards_grant(first_device(), &like);
  CHECK_EQ(credit_in_pools(), 64 * KIB);
  CHECK_EQ(heap_of(r)->cache.shard.credit[ESPER_ALL].bytes, 0);
  caches_resume(first_device());
  unlock(&first_device()->lock);
  world_free(&w, p);
}

SCENE(credit_beyond_a_peak_is_noticed)
{
  world_free(&w, world_malloc(&w, MIB, r));
  stat_shard_t *shard = &heap_of(r)->cache.shard;
  credit_pool_t *pool = &first_device()->credit.pools[0];
  CHECK(shards_are_valid(first_device()));
  shard->granted[ESPER_ALL].bytes += MIB;
  CHECK(!shards_are_valid(first_device()));
  shard->granted[ESPER_ALL].bytes -= MIB;
  pool->left[ESPER_ALL].bytes += MIB;
  CHECK(!shards_are_valid(first_device()));
  pool->left[ESPER_ALL].bytes -= MIB;
  int64_t count = shard->credit[ESPER_SMALL].count;
  shard->credit[ESPER_SMALL].count = -1;
  CHECK(!shards_are_valid(first_device()));
  shard->credit[ESPER_SMALL].count = count;
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

/* Credit for blocks, for their bytes and for what was asked for do not end together. */
SCENE(a_single_stream_stops_for_credit_only_where_a_peak_rises)
{
  enum { LIVE = 64, CHANGES = 20000 };
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
}
