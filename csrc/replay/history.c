#include "history.h"

#include <stdlib.h>

/* PENDING: freed, and in use. Pools that were released are LIVE. */
enum { UNBORN, LIVE, PENDING, DEAD };

/* What a slot is before each kind of operation, and afterwards. */
static const unsigned char before[] = {UNBORN, LIVE, LIVE, PENDING};
static const unsigned char after[] = {LIVE, DEAD, PENDING, DEAD};

typedef struct progress {
  unsigned char *slots, *released;
} progress;

static const char *fault_of(const history *h, const progress *p, const operation *op)
{
  int by_slot = op->kind <= OPERATION_DONE;
  int by_use = op->kind == OPERATION_FREE_PENDING || op->kind == OPERATION_DONE;
  if (op->kind >= OPERATION_KINDS)
    return "its kind is unknown";
  if (by_slot && op->slot >= h->slots)
    return "its slot is beyond the number of slots";
  if (by_use && op->stream >= h->uses)
    return "its use is beyond the number of uses";
  if (op->kind == OPERATION_ALLOC &&
      (op->stream >= h->streams || op->pool >= h->pools || !op->size || p->released[op->pool]))
    return "its stream or pool does not exist, or it has no bytes";
  if (op->kind == OPERATION_RELEASE && (op->pool >= h->pools || p->released[op->pool] ||
                                        !(h->pool_ids[op->pool][0] | h->pool_ids[op->pool][1])))
    return "its pool does not exist, or is the default pool";
  if (by_slot && p->slots[op->slot] != before[op->kind])
    return "its slot is allocated twice, freed without being live, or its use had not begun";
  if (by_slot)
    p->slots[op->slot] = after[op->kind];
  if (op->kind == OPERATION_RELEASE)
    p->released[op->pool] = LIVE;
  return NULL;
}

const char *history_find_fault(const history *h, size_t *at)
{
  progress p = {calloc(h->slots + 1, 1), calloc(h->pools + 1, 1)};
  const char *fault = p.slots && p.released ? NULL : "no host memory";
  for (*at = 0; *at < h->count && !fault; ++*at)
    if ((fault = fault_of(h, &p, &h->operations[*at])))
      break;
  free(p.slots);
  free(p.released);
  return fault;
}
