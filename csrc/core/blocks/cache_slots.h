/* front_slots.h: the blocks of a front, by size: sixteen slots of one size each. */
#ifndef ESPER_FRONT_SLOTS_H
#define ESPER_FRONT_SLOTS_H

#include "../stats/stat_shard.h"
#include "block.h"

enum {
  FRONT_SLOTS = 16, /* sizes */
  FRONT_DEPTH = 64, /* blocks of a size */
};

/* What a malloc wants that waits at its front's gate. */
typedef struct wish {
  ON_ITS_OWN_LINE atomic_int state;
  size_t size, requested;
  block_t *block; /* once it is granted */
} wish_t;

/* front.h. All but the gate is under the gate: that of an open front is taken by
 * whoever is at work in it, that of a closed one stays with the device's lock. */
typedef struct front {
  ON_ITS_OWN_LINE atomic_int gate;
  uint16_t epoch;  /* rises when the front is emptied; 0 is never used */
  bool empty;      /* whoever holds the device's lock said so; the gate is closed */
  bool held;       /* is not to be emptied */
  bool stopped;    /* the gate is held by who has the device's lock */
  bool paused;     /* by fronts_pause */
  bool locked;     /* serves those who hold the device's lock, and nobody else */
  uint16_t filled; /* bit i: slot i has blocks */
  uint8_t count[FRONT_SLOTS];
  _Atomic uint64_t questions;  /* to the driver, whether the stream is captured */
  uint32_t units[FRONT_SLOTS]; /* the size of a slot's blocks, in BLOCK_ALIGN */
  ledger_t ledger;
  block_t *block[FRONT_SLOTS][FRONT_DEPTH];
  wish_t wish;
} front_t;

/* A size has two places where its slot may be. */
static inline unsigned slot_of(uint32_t units)
{
  return units * 0x9e3779b1u >> 28;
}

_Static_assert(FRONT_SLOTS == 16, "slot_of gives so many");

/* So many blocks of a size are kept. Large ones are missed when they are not merged, but
 * who makes a batch of tensors while the last one is alive, or whose memory another thread
 * frees, frees as many at once. */
static inline unsigned depth_of(uint32_t units)
{
  static const uint32_t DEEP = 384 * KIB / BLOCK_ALIGN, SMALL = MIB / BLOCK_ALIGN,
                        MOST = 16 * MIB / BLOCK_ALIGN;
  if (units <= SMALL)
    return units <= DEEP ? FRONT_DEPTH : FRONT_DEPTH / 2;
  return units <= MOST / 2 ? MOST / units : 1;
}

static inline uint32_t units_of(size_t size)
{
  size_t units = size / BLOCK_ALIGN;
  return units <= UINT32_MAX ? (uint32_t)units : 0; /* 0: not for the front */
}

/* -1: none has such a block. */
static inline int slot_with(const front_t *front, uint32_t units)
{
  unsigned slot = slot_of(units);
  if (!(front->filled >> (slot & ~1u) & 3)) /* where sizes do not repeat, as a rule */
    return -1;
  if (front->units[slot] == units && front->count[slot])
    return (int)slot;
  slot ^= 1;
  return front->units[slot] == units && front->count[slot] ? (int)slot : -1;
}

/* False: it has no place there. */
static inline bool slots_push(front_t *front, block_t *block)
{
  uint32_t units = units_of(block->size);
  int slot = slot_with(front, units);
  if (slot < 0) {
    slot = (int)slot_of(units);
    if (front->count[slot])
      slot ^= 1;
    if (front->count[slot] || !units)
      return false;
    front->units[slot] = units;
  } else if (front->count[slot] >= depth_of(units)) {
    return false;
  }
  front->block[slot][front->count[slot]++] = block;
  front->filled |= (uint16_t)(1u << slot);
  return true;
}

static inline void slots_take(front_t *front, int slot, int index)
{
  unsigned last = --front->count[slot];
  if (!last)
    front->filled &= (uint16_t)~(1u << slot);
  for (unsigned i = (unsigned)index; i < last; i++)
    front->block[slot][i] = front->block[slot][i + 1];
}

#endif
