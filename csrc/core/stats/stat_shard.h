/* stat_shard.h: what one heap has counted and not yet added to the statistics.
 *
 * Threads on different streams must not write to a common cache line, so each heap counts in a
 * shard of its own. The statistics are exact once all shards were read.
 *
 * Credit keeps the peaks exact in between. A shard's credit is how much may become active through
 * it before any peak could be passed; all credit together never exceeds the distance between the
 * statistics and their peaks. A shard puts credit that it does not need into one of the device's
 * credit pools; a shard that runs out draws from them. When they are empty, the caller pauses all
 * caches, reads all shards and raises the peaks. So every peak is one that some order of the calls
 * would reach. */
#ifndef ESPER_STAT_SHARD_H
#define ESPER_STAT_SHARD_H

#include "../base/lock.h"
#include "../base/types.h"

/* A number of blocks, their bytes, and the bytes that were asked for. */
typedef struct amounts {
  int64_t count, bytes, requested;
} amounts_t;

/* Arrays of two are indexed by size class (small, large); arrays of ESPER_CLASSES, by ESPER_ALL and
 * size class. */
typedef struct stat_shard {
  ON_ITS_OWN_LINE amounts_t credit[ESPER_CLASSES];
  amounts_t taken[2];               /* became live */
  amounts_t freed[2], satisfied[2]; /* became free; stopped being active. In either order */
  amounts_t paired[2];              /* did both, and is credit again */
  amounts_t granted[ESPER_CLASSES]; /* credit that came from the pools or from credit_grant */
  unsigned number;                  /* of the credit pool that it asks first */
  int64_t keeps, most; /* blocks: with credit for more than `most`, it keeps `keeps` and shares the
                          rest */
} stat_shard_t;

/* Credit that no shard holds. */
typedef struct credit_pool {
  ON_ITS_OWN_LINE latch_t latch; /* may be taken while a cache's latch is held */
  atomic_bool empty;             /* may be read without the latch */
  amounts_t left[ESPER_CLASSES];
} credit_pool_t;

enum { CREDIT_POOLS = 8 };

/* The credit of a device. */
typedef struct credit {
  credit_pool_t pools[CREDIT_POOLS];
  atomic_uint shards; /* made for the default pool so far */
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

/* ---- counting: the caller holds the cache's latch, or the cache is closed ------- */

/* A block becomes live, even without credit for it. */
static inline void shard_overdraw(stat_shard_t *shard, bool large, amounts_t amount)
{
  amounts_sub(&shard->credit[ESPER_ALL], amount);
  amounts_sub(&shard->credit[ESPER_SMALL + large], amount);
  amounts_add(&shard->taken[large], amount);
}

/* Draws credit for some blocks of `amount` from the pools. False: there is not enough for one. */
bool shard_draw(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount);
/* Puts credit into a pool, and keeps enough for some blocks of `amount`. */
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

/* A live block becomes free, and stays active until it is satisfied. Freeing lowers what is
 * allocated, satisfying what is active: it is credit again once both have happened. */
void shard_free(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount);
void shard_satisfy(credit_t *credit, stat_shard_t *shard, bool large, amounts_t amount);

/* ---- reading: all caches are paused or closed --------------------------- */

/* Moves what the shard counted into the statistics. Its credit is gone. */
void shard_read(stat_shard_t *shard, esper_stats *stats);

/* Empties the pools. */
void credit_clear(credit_t *credit);
/* Hands out credit up to the peaks, after all shards were read. `first` (may be NULL) gets credit
 * for one block of `amount` if there is enough; the pools get the rest. */
void credit_grant(credit_t *credit, const esper_stats *stats, stat_shard_t *first, bool large,
                  amounts_t amount);

/* Whether all credit, `granted` to the shards and left in the pools, is within the peaks. */
bool credit_is_valid(const credit_t *credit, const esper_stats *stats,
                     const amounts_t granted[ESPER_CLASSES]);

#endif
