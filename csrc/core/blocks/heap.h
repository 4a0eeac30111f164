/* heap.h: the free blocks of one (pool, stream, capture, tag). */
#ifndef ESPER_HEAP_H
#define ESPER_HEAP_H

#include "../base/rules.h"
#include "../base/tag.h"
#include "../order/device.h"
#include "bins.h"
#include "block.h"
#include "cache_slots.h"

enum { INDEXED_STREAMS = 8 }; /* if blocks wait for more streams, each is looked at */

/* No pending block of the heap waits for an event of the stream before number `from`. */
typedef struct awaited {
  const stream_t *stream;
  uint64_t from;
} awaited_t;

typedef struct pending_index {
  unsigned count;
  bool unknown; /* some block waits for something that `on` does not have */
  awaited_t on[INDEXED_STREAMS];
} pending_index_t;

struct heap {
  block_cache_t cache;
  device_t *device;
  pool_t *pool;
  const uint64_t *pool_id;
  stream_t *stream;
  uint64_t capture; /* the capture that its memory was handed out in; 0: none */
  tag_t tag;        /* of all its memory, so that no page has memory of two tags */
  bool quiesced;    /* what is ready owes its stream nothing: a capture may take the heap over */
  bool over;        /* its capture is over; set during a quiesce */
  uint64_t quiesced_at; /* the number of its stream that the last quiesce waited for; 0: none */
  uint64_t quiesced_to; /* the highest stamp of a free that this wait covers */
  branch_t *branch;     /* the stream inside the capture, a reference; NULL: outside */
  bins_t ready[2];      /* by size class: small, large */
  bins_t pending[2];
  unsigned allowance_doubled;    /* how often the allowance was: requests/hold_back.h */
  pending_index_t pending_index; /* pending_index.h */
  block_t *oldest_pending, *newest_pending;
  uint64_t seen_progress; /* core->progress when the pending blocks were last looked at */
  unsigned borrowed;      /* small blocks of other heaps, since it last had to grow instead */
  heap_t *next;           /* in the pool, or among the spare heaps */
  heap_t *previous_on_device, *next_on_device;
};

/* The stream whose events tell that free memory of the heap has left all work behind: the one that
 * stands for all streams. Any of them may have used the memory without a mark, and the home stream
 * may wait for that after the free (rule 3). */
static inline stream_t *owner_order_stream(const heap_t *heap)
{
  return RULE(LATE_WAITS_COUNT) ? heap->device->all_streams : heap->stream;
}

static inline amounts_t amounts_of(const block_t *block)
{
  return (amounts_t){1, (int64_t)block->size, (int64_t)block->requested};
}

/* ---- a device's statistics shards; all caches are paused or closed ----------- */

/* Adds all shards to the statistics, which become exact. All credit is gone. */
void shards_read(device_t *device);
/* Hands out credit again: for one block like `block` (may be NULL) to the shard of its heap, if
 * there is enough, and the rest to the credit pools. */
void shards_grant(device_t *device, const block_t *block);
/* The statistics become exact, and credit is handed out again. */
void shards_collect(device_t *device);
bool shards_are_valid(const device_t *device);

bool heap_is_valid(const heap_t *heap);

#endif
