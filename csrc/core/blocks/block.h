/* block.h: blocks, and how they split and merge. Under the device's lock. */
#ifndef ESPER_BLOCK_H
#define ESPER_BLOCK_H

#include "../order/stream.h"

typedef enum block_state {
  BLOCK_GONE, /* its host memory was returned, and reads as zeros */
  BLOCK_LIVE,
  BLOCK_READY,   /* free, satisfied for its home stream, in heap->ready */
  BLOCK_CACHED,  /* the same, but in heap->front */
  BLOCK_PENDING, /* free, owes uses, in heap->pending */
  BLOCK_CLAIMED, /* free or becoming so, in the hands of one thread, unlocked */
  BLOCK_HOLE,    /* no page is there: in no bin, not in the map, owes nothing */
  BLOCK_FILLING, /* a hole into which one thread is mapping pages, unlocked */
  BLOCK_STALE,   /* its pages serve elsewhere, but are still mapped here: what
                    was enqueued before they moved may still run              */
} block_state;

/* Fields that have nothing to say at the same time share their place: programs have
 * many blocks. */
struct block {
  size_t size;
  segment_t *segment;
  /* Read by map_find without a lock, even of blocks that are gone. */
  uintptr_t address;
  block_t *map_next;
  union {
    block_t *left;      /* in its bin */
    uint16_t fits_best; /* warm: the front's epoch in which it was found to */
  };
  union {
    block_t *right; /* in its bin */
    bool oversize;  /* live, and counted as such */
  };
  union {
    size_t requested; /* by the last malloc; until satisfied */
    block_t **place;  /* of a ready one: what points to it in its bin */
  };
  uint8_t state; /* a block_state; see block_set_state */
  union {
    bool plain;  /* live: at home, outside captures, not oversize */
    bool barred; /* pending: counted in heap->pending_index.barred */
  };
  bool withheld;       /* free, but nobody's until its pool is sealed */
  bool counted_active; /* in the statistics, as active */
  uint32_t user;       /* stream it was last handed out on; see block_user */

  block_t *prev, *next; /* neighbours by address */
  use_t *uses;
  uint64_t stamp; /* owner order; 0: the home stream never had it */
  union {
    uint64_t capture; /* live: that it was handed out in; 0: none */
    block_t *older;   /* pending blocks of the heap, by time of the free;
                             holes of the segment, and stale blocks of the
                             device, in no order                              */
  };
  union {
    block_t *newer;
    uint64_t birth; /* of a ready one: of its segment */
  };
};

_Static_assert(sizeof(block_t) <= 112, "docs/design.md: 112 bytes a block");

struct segment {
  /* Read by every malloc and free of a block there. The first word is the arena's once the
   * segment has gone; who frees twice may still read the others. */
  ON_ITS_OWN_LINE size_t bytes; /* of the memory there; of a classic segment its size */
  heap_t *heap;
  device_t *device;
  page_t *pages;     /* by granule; NULL: a classic segment */
  uint64_t sequence; /* of its birth: orders blocks the same in every run */
  uint64_t used_at;  /* device->large_requests when memory of it was last freed */
  bool large;
  bool oversize; /* counted as such */
  bool captured; /* handed out inside a capture: replays may touch it */
  bool pinned;   /* somebody else knows its pages: none is unmapped */

  uintptr_t address;
  size_t size; /* of the addresses */
  block_t *first;
  size_t touched; /* entries of its pages from the first on that were ever used */
  block_t *holes;
  segment_t *prev, *next; /* of the device, by birth */
};

/* A front's owner reads the states of neighbours while others, who hold the device's
 * lock, change those that mean nothing to it. */
static inline void block_set_state(block_t *block, block_state state)
{
  __atomic_store_n(&block->state, (uint8_t)state, __ATOMIC_RELAXED);
}

static inline block_state block_state_of(const block_t *block)
{
  return (block_state)__atomic_load_n(&block->state, __ATOMIC_RELAXED);
}

/* A new block that is not in the map. NULL: no host memory. */
block_t *block_make(device_t *device, segment_t *segment, uintptr_t address, size_t size);
/* The same, in the map. */
block_t *block_create(device_t *device, segment_t *segment, uintptr_t address, size_t size);
void block_destroy(device_t *device, block_t *block);
/* The same for a block that has left the map already. */
void block_discard(device_t *device, block_t *block);

/* Cuts `block` down to `size` bytes and returns the rest, which owes whatever
 * the block owes: the caller is taking the front, which owes it no more.
 * NULL: no host memory, nothing changed. */
block_t *block_split(device_t *device, block_t *block, size_t size);

/* `block` takes in its next neighbour; both free and in no bin. */
void block_merge_next(device_t *device, block_t *block);

/* Of a block that was found without a lock. NULL: it has gone since. */
static inline segment_t *block_segment_if_any(const block_t *block)
{
  return __atomic_load_n(&block->segment, __ATOMIC_RELAXED);
}

static inline bool block_is_free(const block_t *block)
{
  return block->state == BLOCK_READY || block->state == BLOCK_PENDING;
}

/* Whether memory is behind it, for all to know. */
static inline bool block_is_mapped(const block_t *block)
{
  return block_state_of(block) < BLOCK_HOLE;
}

/* Whether `stream` is the one it was last handed out on. */
static inline bool block_is_of(const block_t *block, const stream_t *stream)
{
  return block->user == stream->index + 1;
}

static inline void block_set_user(block_t *block, const stream_t *stream)
{
  block->user = stream->index + 1;
}

/* That stream; NULL: it was never handed out. */
stream_t *block_user(const block_t *block);

static inline bool block_is_part(const block_t *block)
{
  return block->prev || block->next;
}

/* Whether the statistics have it as an inactive part: of one in a bin. As in PyTorch:
 * what is free in a mapped segment can go, whatever is beside it. */
static inline bool block_counts_as_split(const block_t *block)
{
  return !block->segment->pages && !block->counted_active && block_is_part(block);
}

/* Somebody will soon ask whether the blocks beside it are free: among many blocks that
 * is memory which no cache has. */
static inline void block_expect_neighbours(const block_t *block)
{
  __builtin_prefetch(block->prev);
  __builtin_prefetch(block->next);
}

bool block_is_valid(const block_t *block);

/* ---- segments ------------------------------------------------------------- */

/* Whether the block is all the memory of its segment. */
static inline bool segment_is_whole(const block_t *block)
{
  return block->size == block->segment->bytes;
}

/* Whether a small rest stays in its block. In a mapped segment none does: it comes
 * together with whatever is freed beside it. */
static inline bool segment_is_coarse(const segment_t *segment)
{
  return segment->large && !segment->pages;
}

/* Its home, for somebody without the lock: it may change at any moment. */
static inline heap_t *segment_home(const segment_t *segment)
{
  return __atomic_load_n(&segment->heap, __ATOMIC_ACQUIRE);
}

#endif
