#include "stat_shard.h"

#include <string.h>

static unsigned pools_in_use(const credit_t *credit)
{
  unsigned shards = atomic_load_explicit(&credit->shards, memory_order_relaxed);
  return shards < CREDIT_POOLS ? shards + !shards : CREDIT_POOLS;
}

static void note_whether_empty(credit_pool_t *pool)
{
  bool empty = true;
  for (int class = 0; class < ESPER_CLASSES; class++)
    empty &= amounts_are_zero(pool->left[class]);
  atomic_store_explicit(&pool->empty, empty, memory_order_relaxed);
}

static int64_t least(int64_t a, int64_t b)
{
  return a < b ? a : b;
}

/* ---- counting ------------------------------------------------------------- */

static void pair(credit_t *credit, stat_shard_t *shard, bool large)
{
  const amounts_t *freed = &shard->freed[large], *satisfied = &shard->satisfied[large];
  amounts_t paired = {least(freed->count, satisfied->count), least(freed->bytes, satisfied->bytes),
                      least(freed->requested, satisfied->requested)};
  amounts_t more = paired;
  amounts_sub(&more, shard->paired[large]);
  shard->paired[large] = paired;
  shard_return(credit, shard, large, more);
}

void shard_free(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount)
{
  amounts_add(&shard->freed[large], amount);
  pair(credit, shard, large);
}

void shard_satisfy(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount)
{
  amounts_add(&shard->satisfied[large], amount);
  pair(credit, shard, large);
}

/* A shard takes and keeps less when the pool has less left. It always keeps credit for one block:
 * otherwise a thread that frees what it just allocated would go to a pool each time. */
static void adapt(const credit_pool_t *pool, stat_shard_t *shard, amounts_t amount)
{
  enum { MOST = 16, PART = 4 }; /* blocks; a quarter of what is left */
  const amounts_t *left = &pool->left[ESPER_ALL];
  int64_t blocks = amount.bytes ? least(left->count, left->bytes / amount.bytes) : left->count;
  int64_t keeps = least(blocks / PART, MOST);
  shard->keeps = keeps ? keeps : 1;
  shard->most = keeps > 1 ? 2 * keeps : shard->keeps;
}

/* If the credit is too small for `amount`, draws one figure from the pool: enough for `blocks`
 * blocks, but at most half of what is left, unless one block needs more. False: the credit is still
 * too small. */
static bool draw(int64_t *left, int64_t *granted, int64_t *credit, int64_t amount, int64_t blocks)
{
  int64_t more = amount * blocks;
  if (*credit >= amount)
    return true;
  if (more > *left / 2)
    more = *left / 2;
  if (more < amount - *credit)
    more = least(amount - *credit, *left);
  *left -= more;
  *granted += more;
  *credit += more;
  return *credit >= amount;
}

static bool draw_class(credit_pool_t *pool, stat_shard_t *shard, int class, amounts_t amount)
{
  amounts_t *left = &pool->left[class], *granted = &shard->granted[class];
  amounts_t *credit = &shard->credit[class];
  int64_t n = shard->keeps;
  bool count = draw(&left->count, &granted->count, &credit->count, amount.count, n);
  bool bytes = draw(&left->bytes, &granted->bytes, &credit->bytes, amount.bytes, n);
  return draw(&left->requested, &granted->requested, &credit->requested, amount.requested, n) &&
         count && bytes;
}

__attribute__((noinline)) bool shard_draw(credit_t *credit, stat_shard_t *shard, bool large,
                                          amounts_t amount)
{
  bool drawn = false;
  unsigned pools = pools_in_use(credit);
  for (unsigned i = 0; i < pools && !drawn; i++) {
    credit_pool_t *pool = &credit->pools[(shard->number + i) % pools];
    if (atomic_load_explicit(&pool->empty, memory_order_relaxed))
      continue;
    latch_take(&pool->latch);
    adapt(pool, shard, amount);
    drawn = draw_class(pool, shard, ESPER_ALL, amount);
    drawn = draw_class(pool, shard, ESPER_SMALL + large, amount) && drawn;
    note_whether_empty(pool);
    latch_leave(&pool->latch);
  }
  return drawn;
}

static void share(int64_t *left, int64_t *granted, int64_t *credit, int64_t kept)
{
  int64_t less = *credit - kept;
  if (less <= 0)
    return;
  *left += less;
  *granted -= less;
  *credit -= less;
}

static void share_class(credit_pool_t *pool, stat_shard_t *shard, int class, amounts_t amount)
{
  amounts_t *left = &pool->left[class], *granted = &shard->granted[class];
  amounts_t *credit = &shard->credit[class];
  int64_t n = shard->keeps;
  share(&left->count, &granted->count, &credit->count, amount.count * n);
  share(&left->bytes, &granted->bytes, &credit->bytes, amount.bytes * n);
  share(&left->requested, &granted->requested, &credit->requested, amount.requested * n);
}

__attribute__((noinline)) void shard_share(credit_t *credit, stat_shard_t *shard, bool large,
                                           amounts_t amount)
{
  credit_pool_t *pool = &credit->pools[shard->number % pools_in_use(credit)];
  latch_take(&pool->latch);
  adapt(pool, shard, amount);
  share_class(pool, shard, ESPER_ALL, amount);
  share_class(pool, shard, ESPER_SMALL + large, amount);
  note_whether_empty(pool);
  latch_leave(&pool->latch);
}

/* ---- reading -------------------------------------------------------------- */

static void stat_apply(esper_stat *stat, int64_t taken, int64_t more)
{
  stat->current += more;
  stat->allocated += taken;
  stat->freed += taken - more;
}

static void read_class(esper_stats *s, int class, amounts_t taken, amounts_t active,
                       amounts_t allocated)
{
  stat_apply(&s->active[class], taken.count, active.count);
  stat_apply(&s->active_bytes[class], taken.bytes, active.bytes);
  stat_apply(&s->requested_bytes[class], taken.requested, active.requested);
  stat_apply(&s->allocation[class], taken.count, allocated.count);
  stat_apply(&s->allocated_bytes[class], taken.bytes, allocated.bytes);
}

static bool is_untouched(const stat_shard_t *shard, int large)
{
  int class = ESPER_SMALL + large;
  return !shard->taken[large].count && !shard->freed[large].count &&
         !shard->satisfied[large].count &&
         shard->granted[class].count == shard->credit[class].count;
}

void shard_read(stat_shard_t *shard, esper_stats *stats)
{
  for (int large = 0; large < 2; large++) {
    int class = ESPER_SMALL + large;
    if (is_untouched(shard, large))
      continue;
    amounts_t active = shard->granted[class], allocated;
    amounts_sub(&active, shard->credit[class]);
    amounts_add(&active, shard->paired[large]);
    allocated = active;
    amounts_sub(&active, shard->satisfied[large]);
    amounts_sub(&allocated, shard->freed[large]);
    read_class(stats, ESPER_ALL, shard->taken[large], active, allocated);
    read_class(stats, class, shard->taken[large], active, allocated);
    shard->taken[large] = shard->freed[large] = shard->satisfied[large] = shard->paired[large] =
        (amounts_t){0};
  }
  for (int class = 0; class < ESPER_CLASSES; class++)
    shard->granted[class] = shard->credit[class] = (amounts_t){0};
  shard->keeps = shard->most = 0;
}

/* ---- granting ------------------------------------------------------------- */

void credit_clear(credit_t *credit)
{
  for (unsigned i = 0, n = pools_in_use(credit); i < n; i++) {
    memset(credit->pools[i].left, 0, sizeof credit->pools[i].left);
    atomic_store_explicit(&credit->pools[i].empty, true, memory_order_relaxed);
  }
}

static int64_t below_peak(const esper_stat *stat)
{
  return stat->peak - stat->current;
}

static amounts_t credit_of_class(const esper_stats *s, int class)
{
  return (
      amounts_t){least(below_peak(&s->active[class]), below_peak(&s->allocation[class])),
                 least(below_peak(&s->active_bytes[class]), below_peak(&s->allocated_bytes[class])),
                 below_peak(&s->requested_bytes[class])};
}

/* Fills the pools in equal parts. False: there is nothing to put in. */
static bool fill_pools(credit_t *credit, int class, amounts_t left)
{
  bool any = !amounts_are_zero(left);
  for (int i = 0, parts = any ? (int)pools_in_use(credit) : 0; parts > 0; i++, parts--) {
    amounts_t part = {left.count / parts, left.bytes / parts, left.requested / parts};
    amounts_sub(&left, part);
    credit->pools[i].left[class] = part;
  }
  return any;
}

void credit_grant(credit_t *credit, const esper_stats *stats, stat_shard_t *first, bool large,
                  amounts_t amount)
{
  bool any = false;
  int other = large ? ESPER_SMALL : ESPER_LARGE;
  for (int class = 0; class < ESPER_CLASSES; class++) {
    amounts_t left = credit_of_class(stats, class);
    if (first && class != other && amounts_cover(&left, amount)) {
      first->granted[class] = first->credit[class] = amount;
      amounts_sub(&left, amount);
    }
    any |= fill_pools(credit, class, left);
  }
  for (unsigned i = 0, n = any ? pools_in_use(credit) : 0; i < n; i++)
    note_whether_empty(&credit->pools[i]);
}

bool credit_is_valid(const credit_t *credit, const esper_stats *stats,
                     const amounts_t granted[ESPER_CLASSES])
{
  bool valid = true;
  for (int class = 0; class < ESPER_CLASSES; class++) {
    amounts_t sum = granted[class], most = credit_of_class(stats, class);
    for (int i = 0; i < CREDIT_POOLS; i++) {
      amounts_add(&sum, credit->pools[i].left[class]);
      valid &= amounts_cover(&credit->pools[i].left[class], (amounts_t){0});
    }
    valid &= amounts_cover(&most, sum);
  }
  return valid;
}
