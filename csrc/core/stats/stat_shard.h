/* stat_shard.h: what the statistics have not yet been told of one heap's blocks.
 *
 * Threads on different streams must not write to a common line, so each heap counts what
 * becomes live, free and satisfied in a shard of its own. The statistics are exact once all
 * shards were read.
 *
 * Credit keeps the peaks exact without that. A shard's credit is how much may become active
 * through it before any peak could be passed. All credit together never exceeds the distance
 * between the statistics and their peaks. A shard with more than it needs shares it through
 * one of the device's credit pools, and a shard that runs out draws from them. When no pool
 * has any, the caller stops all threads, reads all shards and raises the peaks, so every peak
 * is that of some order of the calls. */
#ifndef ESPER_STAT_SHARD_H
#define ESPER_STAT_SHARD_H

#include "../base/lock.h"
#include "../base/types.h"

/* How much of something: blocks, their bytes, the bytes asked for. */
typedef struct amounts {
  int64_t count, bytes, requested;
} amounts_t;

/* Arrays of two are by size class, small and large; of ESPER_CLASSES, by ESPER_ALL and size
 * class. */
typedef struct stat_shard {
  ON_ITS_OWN_LINE amounts_t credit[ESPER_CLASSES];
  amounts_t taken[2];               /* became live */
  amounts_t freed[2], satisfied[2]; /* became free; stopped being active: in either order */
  amounts_t paired[2];              /* both: it is credit again */
  amounts_t granted[ESPER_CLASSES]; /* the credit that came from outside */
  unsigned number;                  /* it asks the credit pool of this number first */
  int64_t keeps, most;              /* blocks: beyond credit for `most` it shares all but `keeps` */
} stat_shard_t;

/* Credit that no shard has. */
typedef struct credit_pool {
  ON_ITS_OWN_LINE latch_t latch; /* taken under a cache's latch */
  atomic_bool empty;             /* may be read without the latch */
  amounts_t left[ESPER_CLASSES];
} credit_pool_t;

enum { CREDIT_POOLS = 8 };

/* A device's. */
typedef struct credit {
  credit_pool_t pools[CREDIT_POOLS];
  atomic_uint shards; /* that were ever made for the default pool */
} credit_t;

static inline bool amounts_cover(const amounts_t *credit, amounts_t wanted)
{
  return credit->count >= wanted.count && credit->bytes >= wanted.bytes &&
         credit->requested >= wanted.requested;
}

static inline bool amounts_are_zero(amounts_t a)
{
  return !(a.count | a.bytes | a.requested);
}

static inline void amounts_add(amounts_t *sum, amounts_t more)
{
  sum->count += more.count;
  sum->bytes += more.bytes;
  sum->requested += more.requested;
}

static inline void amounts_sub(amounts_t *rest, amounts_t less)
{
  rest->count -= less.count;
  rest->bytes -= less.bytes;
  rest->requested -= less.requested;
}

/* ---- counting: whoever owns the shard alone, through its cache's latch ------- */

/* A block becomes live, whether there is credit or not. */
static inline void shard_overdraw(stat_shard_t *shard, bool large, amounts_t amount)
{
  amounts_sub(&shard->credit[ESPER_ALL], amount);
  amounts_sub(&shard->credit[ESPER_SMALL + large], amount);
  amounts_add(&shard->taken[large], amount);
}

/* Credit for some such blocks, from the pools. False: they have none for one. */
bool shard_draw(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount);
/* Puts what exceeds the credit for some such blocks into a pool. */
void shard_share(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount);

/* A block becomes live. False: there is no credit, and nothing has happened. */
static inline bool shard_take(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount)
{
  amounts_t *all = &shard->credit[ESPER_ALL], *class = &shard->credit[ESPER_SMALL + large];
  if (__builtin_expect(!amounts_cover(all, amount) || !amounts_cover(class, amount), 0) &&
      !shard_draw(credit, shard, large, amount))
    return false;
  shard_overdraw(shard, large, amount);
  return true;
}

/* A live block becomes free and owes nothing. */
static inline void shard_return(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount)
{
  amounts_add(&shard->credit[ESPER_ALL], amount);
  amounts_add(&shard->credit[ESPER_SMALL + large], amount);
  if (__builtin_expect(shard->credit[ESPER_ALL].count > shard->most, 0))
    shard_share(credit, shard, large, amount);
}

/* A live block becomes free and stays active, until it is satisfied. The one lowers what is
 * allocated, the other what is active: there is credit once both have happened. */
void shard_free(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount);
void shard_satisfy(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount);

/* ---- reading: nobody counts meanwhile --------------------------------------- */

/* Tells the statistics what the shard counted. Its credit is gone. */
void shard_read(stat_shard_t *shard, esper_stats *stats);

/* Empties the pools. */
void credit_clear(credit_t *credit);
/* Hands out credit up to the peaks. All shards were read. `first` (may be NULL) gets credit
 * for one block of `amount` if there is that much; the pools get the rest. */
void credit_grant(credit_t *credit, const esper_stats *stats, stat_shard_t *first, bool large,
                  amounts_t amount);

/* Whether no peak could be passed by what was granted: `granted` to the shards, the rest to
 * the pools, by class. */
bool credit_is_valid(const credit_t *credit, const esper_stats *stats,
                     const amounts_t granted[ESPER_CLASSES]);

#endif
