#include "block.h"

#include <string.h>

#include "../base/core_assert.h"
#include "../order/stream.h"
#include "block_cache.h"
#include "map.h"
#include "pending_index.h"
#include "use.h"

block_t *block_make(device_t *device, segment_t *segment, uintptr_t address, size_t size)
{
  block_t *block = arena_take(&device->blocks);
  if (!block)
    return NULL;
  memset(block, 0, offsetof(block_t, address));
  const size_t behind = offsetof(block_t, map_next) + sizeof block->map_next;
  memset((char *)block + behind, 0, sizeof *block - behind);
  __atomic_store_n(&block->address, address, __ATOMIC_RELAXED);
  block->size = size;
  block->segment = segment;
  block_set_state(block, BLOCK_CLAIMED);
  return block;
}

stream_t *block_user(const block_t *block)
{
  return block->user ? stream_at(block->segment->device->core, block->user - 1) : NULL;
}

block_t *block_create(device_t *device, segment_t *segment, uintptr_t address, size_t size)
{
  block_t *block = block_make(device, segment, address, size);
  if (block)
    map_insert(device->core->map, block);
  return block;
}

void block_discard(device_t *device, block_t *block)
{
  uses_drop(device, block);
  arena_give(&device->blocks, block);
}

void block_destroy(device_t *device, block_t *block)
{
  map_remove(device->core->map, block);
  block_discard(device, block);
}

block_t *block_split(device_t *device, block_t *block, size_t size)
{
  core_assert(cache_is_quiet(&block->segment->heap->cache));
  block_t *rest = block_create(device, block->segment, block->address + size, block->size - size);
  if (!rest)
    return NULL;
  block->size = size;
  rest->user = block->user;
  rest->stamp = block->stamp;
  if (RULE(SPLIT_KEEPS_USES)) {
    rest->uses = block->uses;
    block->uses = NULL;
  }
  rest->prev = block;
  rest->next = block->next;
  if (rest->next)
    rest->next->prev = rest;
  block->next = rest;
  return rest;
}

void block_merge_next(device_t *device, block_t *block)
{
  core_assert(cache_is_quiet(&block->segment->heap->cache));
  block_t *next = block->next;
  block->size += next->size;
  if (next->stamp > block->stamp && RULE(MERGE_TAKES_LATER_STAMP))
    block->stamp = next->stamp;
  uses_unite(device, block, next);
  block->next = next->next;
  if (block->next)
    block->next->prev = block;
  block_destroy(device, next);
}

bool block_is_valid(const block_t *block)
{
  const segment_t *segment = block->segment;
  return block->size > 0 && block->size % BLOCK_ALIGN == 0 && block->address >= segment->address &&
         block->address + block->size <= segment->address + segment->size &&
         (block->prev ? block->prev->next == block &&
                            block->prev->address + block->prev->size == block->address
                      : segment->first == block && segment->address == block->address) &&
         (block->next ? block->next->prev == block
                      : block->address + block->size == segment->address + segment->size) &&
         !((block->state == BLOCK_READY || block->state == BLOCK_HOLE) && block->next &&
           block->next->state == block->state) &&
         /* a stale block owes owner order, also while it is being unmapped */
         (block_is_mapped(block) ||
          (segment->pages && !block->uses && (block->state != BLOCK_HOLE || !block->stamp))) &&
         (block->state != BLOCK_LIVE || block->requested <= block->size) &&
         (block->state != BLOCK_PENDING || pending_index_is_valid(block)) &&
         /* the thread that claimed it may be changing its uses */
         (block->state == BLOCK_CLAIMED || uses_are_valid(block));
}
