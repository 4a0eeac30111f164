/* checkpoint.h: a pool's blocks written down, and put back later, in place.
 *
 * A tree of graphs records one graph after another into one pool, and between
 * two recordings it replays others, which use the pool's memory behind the
 * allocator's back. Before it records again it puts the pool into the state in
 * which the last replayed graph's recording left it: the same blocks, of the
 * same sizes, live or free. What the bytes owe by then stays on them. */
#ifndef ESPER_CHECKPOINT_H
#define ESPER_CHECKPOINT_H

#include "../base/types.h"

/* A block, or a hole, as it was. */
typedef struct part {
  size_t size, requested;
  stream_t *user;   /* of a live one */
  uint64_t capture; /* that it was handed out in; 0: none */
  bool live;        /* else free, or a hole */
} part_t;

/* A segment, and the parts that tile it. */
typedef struct chain {
  uintptr_t address;
  size_t size;
  uint64_t sequence;   /* the segment's own: another may get its address */
  size_t first, count; /* into the parts */
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

/* The pool, and the device's lock held: no call is at work in the pool, and every
 * block that is not live is in a bin. NULL: nobody refers to such a pool. */
pool_t *checkpoint_lock_pool(device_t *device, const uint64_t id[2]);
/* The errors of these calls. */
esper_status checkpoint_no_pool(const device_t *device, const uint64_t id[2]);
esper_status checkpoint_no_host_memory(void);

bool checkpoint_is_valid(const esper_checkpoint *checkpoint);

#endif
