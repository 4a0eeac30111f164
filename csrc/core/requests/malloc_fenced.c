#include "malloc_fenced.h"

#include "../memory/fence.h"
#include "hold_back.h"
#include "release.h"

static block_t *raise_fence(request_t *q, size_t most, esper_status *status)
{
  block_t *block;
  release_fenced(q->device, most);
  lock(&q->device->growth_lock);
  *status = fence_obtain(q->heap, q->size, q->large, &block, &q->addresses_missing);
  unlock(&q->device->growth_lock);
  return request_hand_out_new(q, *status, block);
}

block_t *malloc_take_fenced(request_t *q, esper_status *status)
{
  block_t *block = raise_fence(q, PASSED_OVER, status);
  if (!block && *status == ESPER_OUT_OF_MEMORY && call_free_memory(q, true))
    block = raise_fence(q, SIZE_MAX, status);
  if (*status != ESPER_OUT_OF_MEMORY)
    return block;
  drain_without_embedder(q, 0);
  if (!(block = raise_fence(q, SIZE_MAX, status)) && *status == ESPER_OUT_OF_MEMORY &&
      release_cached(q->device, NULL, false, SIZE_MAX))
    block = raise_fence(q, SIZE_MAX, status);
  return block;
}
