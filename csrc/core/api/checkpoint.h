/* checkpoint.h: a note of a pool's blocks, which can be restored later in place.
 *
 * PyTorch's graph trees record graph after graph into one pool. Between recordings they replay
 * graphs, which use the pool's memory without calling the allocator. Before recording again they
 * restore the pool to the state after the last replayed graph's recording: the same blocks, of the
 * same sizes, live or free. What the bytes owe by then stays on them. */
#ifndef ESPER_CHECKPOINT_H
#define ESPER_CHECKPOINT_H

#include "../base/types.h"

/* A block or a hole, as it was. */
typedef struct part {
  size_t size, requested;
  stream_t *user;   /* of a live block */
  uint64_t capture; /* capture it was handed out in; 0: none */
  bool live;        /* otherwise free, or a hole */
} part_t;

/* A segment, and the parts that tile it. */
typedef struct chain {
  uintptr_t address;
  size_t size;
  uint64_t sequence;   /* of the segment, because another may get its address */
  size_t first, count; /* indices into parts */
} chain_t;

struct esper_checkpoint {
  uint64_t core; /* its serial */
  int device;
  uint64_t id[2]; /* of the pool */
  chain_t *chains;
  size_t chain_count;
  part_t *parts;
  size_t part_count;
};

/* Finds the pool and returns with the device's lock held, when no call is working in the pool and
 * every block that is not live is in a bin. NULL, without the lock: there is no such pool with
 * references. */
pool_t *checkpoint_lock_pool(device_t *device, const uint64_t id[2]);
/* The errors that these calls set. */
esper_status checkpoint_no_pool(const device_t *device, const uint64_t id[2]);
esper_status checkpoint_no_host_memory(void);

bool checkpoint_is_valid(const esper_checkpoint *checkpoint);

#endif
