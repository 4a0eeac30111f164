#include "heap.h"

#include "cache_latch.h"

void shards_read(device_t *device)
{
  credit_clear(&device->credit);
  for (heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    shard_read(&heap->cache.shard, &device->stats);
}

void shards_grant(device_t *device, const block_t *block)
{
  if (block)
    credit_grant(&device->credit, &device->stats, &block->segment->heap->cache.shard,
                 block->segment->large, amounts_of(block));
  else
    credit_grant(&device->credit, &device->stats, NULL, false, (amounts_t){0});
}

void shards_collect(device_t *device)
{
  caches_pause(device);
  shards_read(device);
  shards_grant(device, NULL);
  caches_resume(device);
}

/* ---- checking -------------------------------------------------------------- */

bool shards_are_valid(const device_t *device)
{
  bool valid = true;
  amounts_t granted[ESPER_CLASSES] = {{0}};
  for (const heap_t *heap = device->heaps; heap; heap = heap->next_on_device)
    for (int class = 0; class < ESPER_CLASSES; class++) {
      amounts_add(&granted[class], heap->cache.shard.granted[class]);
      valid &= amounts_cover(&heap->cache.shard.credit[class], (amounts_t){0});
    }
  return valid && credit_is_valid(&device->credit, &device->stats, granted);
}

bool heap_is_valid(const heap_t *heap)
{
  size_t pending = 0;
  for (const block_t *b = heap->oldest_pending; b; b = b->newer) {
    if (b->state != BLOCK_PENDING || b->segment->heap != heap ||
        (b->newer ? b->newer->older != b : heap->newest_pending != b))
      return false;
    pending++;
  }
  return pending == heap->pending[0].count + heap->pending[1].count &&
         bins_is_valid(&heap->ready[0]) && bins_is_valid(&heap->ready[1]) &&
         bins_is_valid(&heap->pending[0]) && bins_is_valid(&heap->pending[1]);
}
