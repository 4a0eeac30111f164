/* block.h: blocks, and how they split and merge. Under the device's lock. */
#ifndef ESPER_BLOCK_H
#define ESPER_BLOCK_H

#include "../order/stream.h"

typedef enum block_state {
  BLOCK_GONE, /* another thread is using its metadata for a new block */
  BLOCK_LIVE,
  BLOCK_READY,   /* free, satisfied for its home stream, in heap->ready */
  BLOCK_CACHED,  /* free, owes no use, in heap->cache */
  BLOCK_PENDING, /* free, not for its own stream yet: owes uses or is withheld; in heap->pending */
  BLOCK_CLAIMED, /* free or becoming free; one thread works on it without the lock */
  BLOCK_ASLEEP,  /* free, on pages that sleep; serves nothing until they wake */
  BLOCK_HOLE,    /* without pages: in no bin, not in the map, owes nothing */
  BLOCK_FILLING, /* a hole into which one thread maps pages without the lock */
  BLOCK_STALE,   /* its pages moved but are still mapped here, for work enqueued before */
} block_state;

/* Programs have many blocks, so fields that are never needed at the same time share memory. */
struct block {
  size_t size;
  segment_t *segment;
  /* map_find reads these without a lock, even of blocks that are gone. */
  uintptr_t address;
  block_t *map_next;
  union {
    block_t *left; /* in its bin */
    struct {
      uint16_t fits_best; /* cached: the cache's generation in which it was found to fit best */
      /* live: bit i: stream i has a use that lasts until the free. Zero when the block becomes
       * live: blocks in a cache have no uses, and leaving a bin clears the link. */
      uint32_t noted;
    };
  };
  union {
    block_t *right; /* in its bin */
    bool oversize;  /* live: counted as oversize */
  };
  union {
    size_t requested; /* bytes, by the last malloc; until satisfied */
    block_t **place;  /* ready: the link that points to it in its bin */
  };
  uint8_t state;       /* a block_state; see block_set_state */
  bool plain;          /* live: at home, outside captures, not oversize */
  bool withheld;       /* free, but serves no request until its pool is quiesced */
  bool counted_active; /* the statistics count it as active */
  uint32_t user;       /* the stream that it was last handed out on; see block_user */

  block_t *prev, *next; /* neighbours by address */
  use_t *uses;
  uint64_t stamp; /* owner order; 0: it owes none */
  union {
    uint64_t capture; /* live: the one that it was handed out in; 0: none */
    block_t *older;   /* pending: by time of the free; holes and stale blocks: unordered */
  };
  union {
    block_t *newer;
    uint64_t birth; /* ready: its segment's `sequence` */
  };
};

_Static_assert(sizeof(block_t) <= 112, "docs/design.md: 112 bytes a block");

struct segment {
  /* Every malloc and free of a block reads these. Once the segment is gone the first word is the
   * arena's; a second free of a block may still read the others. */
  ON_ITS_OWN_LINE size_t bytes; /* of memory; in a classic segment the same as `size` */
  heap_t *heap;
  device_t *device;
  page_t *pages;     /* by granule; NULL: a classic segment */
  uint64_t sequence; /* its number by birth: orders blocks the same in every run */
  bool large;
  bool oversize; /* counted as oversize */
  bool captured; /* some of it was handed out in a capture: replays may touch it */
  bool pinned;   /* its addresses are known elsewhere: no page is unmapped */
  bool fenced;   /* pages of its own: see fence.h */

  uintptr_t address;
  size_t size; /* of the addresses */
  block_t *first;
  size_t asleep; /* bytes of its pages that sleep, a part of `bytes`; notes read it unlocked */
  size_t absent; /* and of those whose memory went back to the driver, a part of `asleep` */
  uint64_t fence_page; /* the driver's handle */
  size_t touched;      /* entries of `pages`, from the first on, that may have been used */
  block_t *holes;
  segment_t *prev, *next; /* of the device, by birth */
};

/* A thread with a cache's latch reads the states of neighbours while a thread with the device's
 * lock may change them, though never to or from BLOCK_READY. */
static inline void block_set_state(block_t *block, block_state state)
{
  __atomic_store_n(&block->state, (uint8_t)state, __ATOMIC_RELAXED);
}

static inline block_state block_state_of(const block_t *block)
{
  return (block_state)__atomic_load_n(&block->state, __ATOMIC_RELAXED);
}

/* Whether it is the live block that starts at the address. */
static inline bool block_is_live_at(const block_t *block, uintptr_t address)
{
  return block_state_of(block) == BLOCK_LIVE && block->address == address;
}

/* Whether the program has the block, or a thread that claimed it. */
static inline bool block_is_live_or_claimed(const block_t *block)
{
  return block->state == BLOCK_LIVE || block->state == BLOCK_CLAIMED;
}

/* A new block that is not in the map. NULL: no host memory. */
block_t *block_make(device_t *device, segment_t *segment, uintptr_t address, size_t size);
/* A new block in the map. NULL: no host memory. */
block_t *block_create(device_t *device, segment_t *segment, uintptr_t address, size_t size);
void block_destroy(device_t *device, block_t *block);
/* Destroys a block that has left the map already. */
void block_discard(device_t *device, block_t *block);

/* Cuts `block` down to `size` bytes and returns the rest, which owes all that the block owed. The
 * block owes no uses any more: the caller is taking it. NULL: no host memory, nothing changed. */
block_t *block_split(device_t *device, block_t *block, size_t size);

/* `block` takes in its next neighbour. Both are free and in no bin. */
void block_merge_next(device_t *device, block_t *block);

static inline device_t *block_device(const block_t *block)
{
  return block->segment->device;
}

/* The segment of a block that was found without a lock. NULL: the block is gone, and another thread
 * is using its metadata for a new one. */
static inline segment_t *block_segment_if_any(const block_t *block)
{
  return __atomic_load_n(&block->segment, __ATOMIC_RELAXED);
}

/* Whether the block is free and in a bin: neither cached nor claimed. */
static inline bool block_is_in_bin(const block_t *block)
{
  return block->state == BLOCK_READY || block->state == BLOCK_PENDING;
}

/* Whether it has memory: it is no hole, is not being filled and is not stale. */
static inline bool block_is_mapped(const block_t *block)
{
  return block_state_of(block) < BLOCK_HOLE;
}

/* Whether the block was last handed out on `stream`. */
static inline bool block_is_of(const block_t *block, const stream_t *stream)
{
  return block->user == stream->index + 1;
}

static inline void block_set_user(block_t *block, const stream_t *stream)
{
  block->user = stream->index + 1;
}

/* The stream that it was last handed out on; NULL: none. */
stream_t *block_user(const block_t *block);

/* Whether a block in a bin counts as an inactive split. As in PyTorch, blocks of mapped segments do
 * not: their memory can go back whatever is beside it. */
static inline bool block_counts_as_split(const block_t *block)
{
  return !block->segment->pages && !block->counted_active && (block->prev || block->next);
}

/* The caller will soon ask whether the neighbours are free; in a large heap their metadata is in no
 * CPU cache. */
static inline void block_expect_neighbours(const block_t *block)
{
  __builtin_prefetch(block->prev);
  __builtin_prefetch(block->next);
}

bool block_is_valid(const block_t *block);

/* ---- segments ------------------------------------------------------------- */

/* Whether the block is all the memory of its segment. */
static inline bool block_is_whole_segment(const block_t *block)
{
  return block->size == block->segment->bytes;
}

/* The home heap, for callers without the lock: it may change at any moment. */
static inline heap_t *segment_home(const segment_t *segment)
{
  return __atomic_load_n(&segment->heap, __ATOMIC_ACQUIRE);
}

#endif
