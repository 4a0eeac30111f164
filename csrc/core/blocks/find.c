#include "find.h"

#include "block.h"
#include "map.h"

block_t *find_lock_live(core_t *core, const void *ptr)
{
  uintptr_t address = (uintptr_t)ptr;
  block_t *block = ptr ? map_find(core->map, address) : NULL;
  segment_t *segment = block ? block_segment_if_any(block) : map_find_segment(core->map, address);
  if (!segment)
    return NULL;
  device_t *device = segment->device;
  lock(&device->lock);
  if (!block)
    for (block = segment->first; block && block->address + block->size <= address;)
      block = block->next;
  /* The segment may have been another one before the lock was held. */
  if (block && block_state_of(block) == BLOCK_LIVE && address - block->address < block->size)
    return block;
  unlock(&device->lock);
  return NULL;
}
