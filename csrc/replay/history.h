/* history.h: a recorded history as operations, each naming an allocation by its slot. */
#ifndef ESPER_REPLAY_HISTORY_H
#define ESPER_REPLAY_HISTORY_H

#include <stddef.h>
#include <stdint.h>

#include "../esper_alloc.h"

typedef enum operation_kind {
  OPERATION_ALLOC,        /* slot: size bytes on stream, from pool */
  OPERATION_FREE,         /* slot */
  OPERATION_FREE_PENDING, /* slot, used by this stream of the uses */
  OPERATION_DONE,         /* that use of slot is over, and those before it on its stream */
  OPERATION_RELEASE,      /* pool, which serves no later allocation, loses its reference */
  OPERATION_EMPTY,        /* the cache */
  OPERATION_KINDS
} operation_kind;

/* Packed in Python as "=IIIIQ". */
typedef struct operation {
  uint32_t kind;
  uint32_t slot;
  uint32_t stream;
  uint32_t pool;
  uint64_t size;
} operation;

/* What to replay, and on which device. Bytes. */
typedef struct history {
  const operation *operations;
  size_t count;
  size_t start; /* the operations before it only build the initial state */
  size_t slots, streams, uses, pools;
  uint64_t (*pool_ids)[2];
  esper_segments segments;
  int on_cuda;
  size_t total;     /* of the simulated device; 0: practically unlimited */
  size_t taken;     /* of that, what others have */
  size_t limit;     /* what may be reserved; 0: all of it */
  size_t allowance; /* as in esper_config */
  int timed;        /* the time is measured */
} history;

/* Finds the first operation that is out of bounds or out of order, and stores its index. A slot is
 * allocated and freed once, and its use ends after that. NULL: there is none. */
const char *history_find_fault(const history *h, size_t *at);

#endif
