/* cache_slots.h: the fields of a heap's block cache, and its blocks by size: sixteen slots, each
 * for blocks of one size. */
#ifndef ESPER_CACHE_SLOTS_H
#define ESPER_CACHE_SLOTS_H

#include "../stats/stat_shard.h"
#include "block.h"

enum {
  CACHE_SLOTS = 16, /* sizes */
  CACHE_DEPTH = 64, /* blocks of a size */
};

typedef enum cache_state {
  CACHE_CLOSED, /* empty; no thread works in it */
  CACHE_OPEN,
  CACHE_LOCKED, /* serves only the thread with the device's lock */
} cache_state;

/* block_cache.h says what it is for. `state` and `pauses` are under the device's lock, all else
 * under the latch. */
typedef struct block_cache {
  ON_ITS_OWN_LINE atomic_int latch; /* cache_latch.h */
  uint16_t generation; /* changes when `fits_best` of its blocks becomes void; never 0 */
  uint8_t state;       /* a cache_state */
  uint8_t pauses;      /* how many pauses are nested */
  uint16_t filled;     /* bit i: slot i has blocks */
  uint8_t count[CACHE_SLOTS];
  _Atomic uint64_t queries;    /* driver calls: is the stream captured? */
  uint32_t units[CACHE_SLOTS]; /* the size of a slot's blocks, in BLOCK_ALIGN */
  stat_shard_t shard;
  block_t *block[CACHE_SLOTS][CACHE_DEPTH];
} block_cache_t;

/* Blocks of a size are in this slot or in its neighbour. */
static inline unsigned slot_of(uint32_t units)
{
  return units * 0x9e3779b1u >> 28;
}

_Static_assert(CACHE_SLOTS == 16, "slot_of gives four bits");

/* How many blocks of a size the cache keeps. Few large ones, because they stay unmerged. Many
 * smaller ones, because programs may free a whole batch of tensors at once. */
static inline unsigned depth_of(uint32_t units)
{
  static const uint32_t DEEP = 384 * KIB / BLOCK_ALIGN, SMALL = MIB / BLOCK_ALIGN,
                        MOST = 16 * MIB / BLOCK_ALIGN;
  if (units <= SMALL)
    return units <= DEEP ? CACHE_DEPTH : CACHE_DEPTH / 2;
  return units <= MOST / 2 ? MOST / units : 1;
}

static inline uint32_t units_of(size_t size)
{
  size_t units = size / BLOCK_ALIGN;
  return units <= UINT32_MAX ? (uint32_t)units : 0; /* 0: too large for the cache */
}

/* The slot that has blocks of this size; -1: none. */
static inline int slot_with(const block_cache_t *cache, uint32_t units)
{
  unsigned slot = slot_of(units);
  if (!(cache->filled >> (slot & ~1u) & 3)) /* usual where sizes do not repeat */
    return -1;
  if (cache->units[slot] == units && cache->count[slot])
    return (int)slot;
  slot ^= 1;
  return cache->units[slot] == units && cache->count[slot] ? (int)slot : -1;
}

/* False: its slots are full or hold other sizes, or it is too large. */
static inline bool slots_push(block_cache_t *cache, block_t *block)
{
  uint32_t units = units_of(block->size);
  int slot = slot_with(cache, units);
  if (slot < 0) {
    slot = (int)slot_of(units);
    if (cache->count[slot])
      slot ^= 1;
    if (cache->count[slot] || !units)
      return false;
    cache->units[slot] = units;
  } else if (cache->count[slot] >= depth_of(units)) {
    return false;
  }
  cache->block[slot][cache->count[slot]++] = block;
  cache->filled |= (uint16_t)(1u << slot);
  return true;
}

static inline void slots_take(block_cache_t *cache, int slot, int index)
{
  unsigned last = --cache->count[slot];
  if (!last)
    cache->filled &= (uint16_t)~(1u << slot);
  /* Nearly always it is the last one, for which the compiler's memmove is not worth a call. */
  if (__builtin_expect((unsigned)index != last, 0))
    for (unsigned i = (unsigned)index; i < last; i++)
      cache->block[slot][i] = cache->block[slot][i + 1];
}

/* `fits_best` of its blocks becomes void. */
static inline void cache_renew(block_cache_t *cache)
{
  if (++cache->generation >> 15)
    cache->generation = 1;
}

#endif
