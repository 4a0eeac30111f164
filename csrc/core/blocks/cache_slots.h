/* cache_slots.h: the block cache of a heap: its fields, and its blocks by size, sixteen slots
 * of one size each. */
#ifndef ESPER_CACHE_SLOTS_H
#define ESPER_CACHE_SLOTS_H

#include "../stats/stat_shard.h"
#include "block.h"

enum {
  CACHE_SLOTS = 16, /* sizes */
  CACHE_DEPTH = 64, /* blocks of a size */
};

typedef enum cache_state {
  CACHE_CLOSED, /* empty; nobody works in it */
  CACHE_OPEN,
  CACHE_LOCKED, /* serves whoever holds the device's lock, and nobody else */
} cache_state;

/* block_cache.h says what it is for. `state` and `pauses` are under the device's lock, all
 * else is under the latch. */
typedef struct block_cache {
  ON_ITS_OWN_LINE atomic_int latch; /* cache_latch.h */
  uint16_t epoch;                   /* rises when what was found of the blocks is void; never 0 */
  uint8_t state;                    /* a cache_state */
  uint8_t pauses;                   /* by whoever holds the device's lock, one in another */
  uint16_t filled;                  /* bit i: slot i has blocks */
  uint8_t count[CACHE_SLOTS];
  _Atomic uint64_t queries;    /* to the driver, whether the stream is captured */
  uint32_t units[CACHE_SLOTS]; /* the size of a slot's blocks, in BLOCK_ALIGN */
  stat_shard_t shard;
  block_t *block[CACHE_SLOTS][CACHE_DEPTH];
} block_cache_t;

/* A size may be in either of two slots: this one or its neighbour. */
static inline unsigned slot_of(uint32_t units)
{
  return units * 0x9e3779b1u >> 28;
}

_Static_assert(CACHE_SLOTS == 16, "slot_of gives four bits");

/* How many blocks of a size the cache keeps. Large ones that stay unmerged are missed
 * elsewhere; but a program that makes a batch of tensors while the last batch lives, or whose
 * memory another thread frees, frees a whole batch at once. */
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

/* -1: no slot has such a block. */
static inline int slot_with(const block_cache_t *cache, uint32_t units)
{
  unsigned slot = slot_of(units);
  if (!(cache->filled >> (slot & ~1u) & 3)) /* the rule where sizes do not repeat */
    return -1;
  if (cache->units[slot] == units && cache->count[slot])
    return (int)slot;
  slot ^= 1;
  return cache->units[slot] == units && cache->count[slot] ? (int)slot : -1;
}

/* False: no slot has room for it. */
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
  for (unsigned i = (unsigned)index; i < last; i++)
    cache->block[slot][i] = cache->block[slot][i + 1];
}

/* What was found of its blocks holds no more. */
static inline void cache_renew(block_cache_t *cache)
{
  if (++cache->epoch >> 15)
    cache->epoch = 1;
}

#endif
