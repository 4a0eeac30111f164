/* Statistics shards of their own: what they count, and the credit that keeps the peaks exact. */
#include "core/stats/stat_shard.h"

#include "check.h"
#include "core/stats/stats.h"

enum { SHARDS = 12 };

static esper_stats stats;
static credit_t credit;
static stat_shard_t shard[SHARDS];

/* `shards` of them ask for credit. */
static void begin(unsigned shards)
{
  memset(&stats, 0, sizeof stats);
  memset(&credit, 0, sizeof credit);
  memset(shard, 0, sizeof shard);
  atomic_store(&credit.shards, shards);
  for (unsigned i = 0; i < SHARDS; i++)
    shard[i].number = i;
  credit_clear(&credit);
}

static amounts_t blocks(int64_t count)
{
  return (amounts_t){count, count * 1024, count * 1000};
}

static void read_all(void)
{
  credit_clear(&credit);
  for (int i = 0; i < SHARDS; i++)
    shard_read(&shard[i], &stats);
}

/* What a device does when a shard has no credit. */
static void take_past_credit(int i, bool large)
{
  shard_overdraw(&shard[i], large, blocks(1));
  read_all();
  stats_raise_peaks(&stats);
  credit_grant(&credit, &stats, &shard[i], large, blocks(1));
}

static void take(int i, bool large)
{
  if (!shard_take(&credit, &shard[i], large, blocks(1)))
    take_past_credit(i, large);
}

static void give(int i, bool large)
{
  shard_return(&credit, &shard[i], large, blocks(1));
}

/* Peaks of `peak` small blocks with nothing live, and their credit in the pools. */
static void begin_with_peak(unsigned shards, int peak)
{
  begin(shards);
  for (int i = 0; i < peak; i++)
    take(0, false);
  for (int i = 0; i < peak; i++)
    give(0, false);
  read_all();
  credit_grant(&credit, &stats, NULL, false, blocks(1));
}

static bool is_valid(void)
{
  amounts_t granted[ESPER_CLASSES] = {{0}};
  for (int i = 0; i < SHARDS; i++)
    for (int class = 0; class < ESPER_CLASSES; class++)
      amounts_add(&granted[class], shard[i].granted[class]);
  return credit_is_valid(&credit, &stats, granted);
}

static int64_t left(unsigned pool)
{
  return credit.pools[pool].left[ESPER_ALL].count;
}

/* ---- peaks ------------------------------------------------------------------------- */

TEST(no_peak_is_passed_by_credit_alone)
{
  begin_with_peak(SHARDS, 40);
  CHECK(is_valid());
  int taken = 0;
  for (int more = 1; more;) {
    more = 0;
    for (int i = 0; i < SHARDS; i++)
      more += shard_take(&credit, &shard[i], false, blocks(1));
    taken += more;
    CHECK(taken <= 40);
    CHECK(is_valid());
  }
  CHECK(taken > 0);
  read_all();
  CHECK_EQ(stats.active[ESPER_ALL].current, taken);
  CHECK_EQ(stats.active[ESPER_ALL].peak, 40);
}

/* Whatever shards the blocks are counted in, the peak is the highest sum. */
TEST(peaks_are_those_of_the_calls_in_their_order)
{
  begin(SHARDS);
  int live[SHARDS][2] = {{0}}, sum[2] = {0}, peak[2] = {0}, peak_of_all = 0;
  uint64_t state = 1;
  for (int i = 0; i < 20000; i++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    int k = (int)(state >> 33) % SHARDS, large = state >> 60 & 1;
    if (state >> 50 & 1 && live[k][large]) {
      give(k, large);
      live[k][large]--;
      sum[large]--;
    } else if (sum[large] < 100) {
      take(k, large);
      live[k][large]++;
      sum[large]++;
    }
    peak[large] = sum[large] > peak[large] ? sum[large] : peak[large];
    peak_of_all = sum[0] + sum[1] > peak_of_all ? sum[0] + sum[1] : peak_of_all;
    CHECK_EQ(stats.allocation[ESPER_SMALL].peak, peak[0]);
    CHECK_EQ(stats.allocation[ESPER_LARGE].peak, peak[1]);
    CHECK_EQ(stats.active_bytes[ESPER_ALL].peak, peak_of_all * 1024);
    if (i % 1000 == 0)
      CHECK(is_valid());
  }
  read_all();
  CHECK_EQ(stats.allocation[ESPER_ALL].current, sum[0] + sum[1]);
  CHECK_EQ(stats.requested_bytes[ESPER_LARGE].current, sum[1] * 1000);
}

TEST(credit_of_one_size_class_is_none_of_the_other)
{
  begin_with_peak(1, 4);
  CHECK(!shard_take(&credit, &shard[0], true, blocks(1)));
  CHECK(shard_take(&credit, &shard[0], false, blocks(1)));
}

/* A few large blocks and many small ones need different things. */
TEST(credit_is_short_when_any_figure_is)
{
  begin_with_peak(1, 4);
  CHECK(!shard_take(&credit, &shard[0], false, (amounts_t){1, 5 * 1024, 100}));
  CHECK(!shard_take(&credit, &shard[0], false, (amounts_t){1, 512, 5000}));
  CHECK(shard_take(&credit, &shard[0], false, (amounts_t){1, 4 * 1024, 4000}));
  CHECK(!shard_take(&credit, &shard[0], false, (amounts_t){1, 512, 1}));
}

/* ---- the pools --------------------------------------------------------------------- */

TEST(what_one_shard_gives_up_another_draws)
{
  begin_with_peak(2, 100);
  int taken = 0;
  while (taken < 100 && shard_take(&credit, &shard[0], false, blocks(1)))
    taken++;
  CHECK_EQ(taken, 100); /* half of it lay in the other shard's pool */
  CHECK(!shard_take(&credit, &shard[1], false, blocks(1)));
  for (int i = 0; i < 100; i++)
    give(0, false);
  CHECK(shard[0].credit[ESPER_ALL].count <= shard[0].most);
  CHECK(left(0) + left(1) >= 64);
  for (int i = 0; i < 64; i++)
    CHECK(shard_take(&credit, &shard[1], false, blocks(1)));
  CHECK(is_valid());
}

TEST(there_are_as_many_pools_as_shards_up_to_eight)
{
  static const unsigned SHARDS_MADE[] = {0, 1, 3, CREDIT_POOLS, SHARDS};
  for (int k = 0; k < 5; k++) {
    unsigned made = SHARDS_MADE[k], pools = made ? made : 1;
    if (pools > CREDIT_POOLS)
      pools = CREDIT_POOLS;
    begin_with_peak(made, 50);
    int64_t sum = 0;
    for (unsigned i = 0; i < CREDIT_POOLS; i++) {
      CHECK_EQ(left(i) > 0, i < pools);
      CHECK(i >= pools || left(i) - left(0) <= 1); /* equal parts */
      CHECK(i >= pools || !atomic_load(&credit.pools[i].empty));
      sum += left(i);
    }
    CHECK_EQ(sum, 50);
    credit_clear(&credit);
    for (unsigned i = 0; i < pools; i++)
      CHECK(!left(i) && atomic_load(&credit.pools[i].empty));
  }
}

TEST(credit_that_exceeds_a_peak_is_noticed)
{
  begin_with_peak(2, 10);
  CHECK(is_valid());
  credit.pools[1].left[ESPER_SMALL].count++;
  CHECK(!is_valid());
  credit.pools[1].left[ESPER_SMALL].count--;
  shard[5].granted[ESPER_ALL].requested++;
  CHECK(!is_valid());
  shard[5].granted[ESPER_ALL].requested--;
  credit.pools[0].left[ESPER_LARGE].bytes = -1;
  CHECK(!is_valid());
  credit.pools[0].left[ESPER_LARGE].bytes = 0;
  stats.active[ESPER_ALL].current++;
  CHECK(!is_valid());
  stats.active[ESPER_ALL].current--;
  CHECK(is_valid());
}
