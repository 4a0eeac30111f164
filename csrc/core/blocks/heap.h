/* heap.h: the free blocks of (pool, stream, capture), and how they are found. */
#ifndef ESPER_HEAP_H
#define ESPER_HEAP_H

#include "bins.h"
#include "block.h"
#include "cache_slots.h"

enum { INDEXED_STREAMS = 8 }; /* with more streams every pending block is looked at */

/* No pending block of the heap waits for an earlier event of the stream. */
typedef struct awaited {
  const stream_t *stream;
  uint64_t from;
} awaited_t;

typedef struct pending_index {
  size_t barred[2]; /* by size class: blocks that owe a use which bars gates */
  unsigned count;
  bool unknown; /* some wait for something else */
  awaited_t on[INDEXED_STREAMS];
} pending_index_t;

struct heap {
  block_cache_t cache;
  device_t *device;
  pool_t *pool;
  const uint64_t *pool_id;
  stream_t *stream;
  uint64_t capture;     /* 0, or the capture this memory was handed out in */
  bool quiesced;        /* what is ready owes nothing: any capture may take over */
  bool over;            /* its capture is; said by the seal that is being made */
  uint64_t quiesced_at; /* number up to which the seal waited for the stream, for
                       the sake of live memory of captures; 0: it did not     */
  branch_t *branch;     /* the stream inside the capture; NULL: outside any; a
                       reference                                              */
  bins_t ready[2];      /* by size class: small, large */
  bins_t pending[2];
  pending_index_t pending_index; /* of the pending ones */
  block_t *oldest_pending, *newest_pending;
  uint64_t seen_epoch; /* core->epoch when the pending blocks were last read */
  unsigned borrowed;   /* small blocks of other heaps, since it was to grow instead */
  heap_t *next;        /* of the pool, or of the spare ones */
  heap_t *previous_on_device, *next_on_device;
};

static inline amounts_t amounts_of(const block_t *block)
{
  return (amounts_t){1, (int64_t)block->size, (int64_t)block->requested};
}

/* ---- the shards of a device's heaps: their caches are paused or closed ------- */

/* The statistics become exact, and all credit is gone. */
void shards_read(device_t *device);
/* Credit is handed out again: for one block like `block` (may be NULL) to its own heap's
 * shard, if there is that much, and the rest to the pools. */
void shards_grant(device_t *device, const block_t *block);
bool shards_are_valid(const device_t *device);

bool heap_is_valid(const heap_t *heap);

#endif
