#include "checkpoint.h"

#include <stdlib.h>
#include <unistd.h>

#include "../base/core_assert.h"
#include "../base/error.h"
#include "../blocks/block.h"
#include "../order/device.h"
#include "../pools/pool.h"

/* ---- a pool for itself --------------------------------------------------- */

pool_t *checkpoint_lock_pool(device_t *device, const uint64_t id[2])
{
  for (;;) {
    lock(&device->lock);
    pool_t *pool = id[0] || id[1] ? pool_find(device, id[0], id[1]) : NULL;
    bool there = pool && pool->references;
    if (there && !pool->busy)
      return pool;
    unlock(&device->lock);
    if (!there)
      return NULL;
    usleep(20); /* a malloc in the pool may wait for the GPU */
  }
}

esper_status checkpoint_no_pool(const device_t *device, const uint64_t id[2])
{
  return error_set(ESPER_INVALID,
                   "device %d has no pool (%llu, %llu) with references: take checkpoints of the "
                   "pool of a graph or a MemPool, while that exists",
                   device->index, (unsigned long long)id[0], (unsigned long long)id[1]);
}

esper_status checkpoint_no_host_memory(void)
{
  return error_set(ESPER_HOST_MEMORY, "no host memory for a checkpoint");
}

/* ---- taking one ----------------------------------------------------------- */

static part_t part_of(const block_t *block)
{
  bool live = block->state == BLOCK_LIVE;
  return (part_t){.size = block->size,
                  .requested = live ? block->requested : 0,
                  .user = live ? block_user(block) : NULL,
                  .capture = live ? block->capture : 0,
                  .live = live};
}

/* Segments without memory are left out, because they may go at any time. */
static bool has_memory(const pool_t *pool, const segment_t *s)
{
  return s->heap->pool == pool && s->bytes;
}

static bool write_down(const pool_t *pool, esper_checkpoint *to)
{
  const segment_t *first = pool->device->first_segment;
  for (const segment_t *s = first; s; s = s->next) {
    to->chain_count += has_memory(pool, s);
    for (const block_t *b = s->first; b && has_memory(pool, s); b = b->next)
      to->part_count++;
  }
  to->chains = malloc((to->chain_count + 1) * sizeof *to->chains);
  to->parts = malloc((to->part_count + 1) * sizeof *to->parts);
  if (!to->chains || !to->parts)
    return false;
  size_t chains = 0, parts = 0;
  for (const segment_t *s = first; s; s = s->next) {
    if (!has_memory(pool, s))
      continue;
    chain_t *chain = &to->chains[chains++];
    *chain =
        (chain_t){.address = s->address, .size = s->size, .sequence = s->sequence, .first = parts};
    for (const block_t *b = s->first; b; b = b->next)
      to->parts[parts++] = part_of(b);
    chain->count = parts - chain->first;
  }
  return true;
}

esper_status esper_checkpoint_take(esper_core *core, int index, uint64_t first, uint64_t second,
                                   esper_checkpoint **checkpoint)
{
  device_t *device;
  *checkpoint = NULL;
  esper_status status = core_device(core, index, &device);
  if (status != ESPER_OK)
    return status;
  esper_checkpoint *made = malloc(sizeof *made);
  if (!made)
    return checkpoint_no_host_memory();
  *made = (esper_checkpoint){.core = core->serial, .device = index, .id = {first, second}};
  pool_t *pool = checkpoint_lock_pool(device, made->id);
  bool written = pool && write_down(pool, made);
  if (written)
    pool->checkpointed = true;
  if (pool)
    unlock(&device->lock);
  if (!written) {
    status = pool ? checkpoint_no_host_memory() : checkpoint_no_pool(device, made->id);
    esper_checkpoint_free(made);
    return status;
  }
  core_assert(checkpoint_is_valid(made));
  *checkpoint = made;
  return ESPER_OK;
}

void esper_checkpoint_free(esper_checkpoint *checkpoint)
{
  if (!checkpoint)
    return;
  free(checkpoint->chains);
  free(checkpoint->parts);
  free(checkpoint);
}

bool checkpoint_is_valid(const esper_checkpoint *checkpoint)
{
  size_t parts = 0;
  for (size_t i = 0; i < checkpoint->chain_count; i++) {
    const chain_t *chain = &checkpoint->chains[i];
    size_t size = 0;
    if (chain->first != parts)
      return false;
    for (size_t k = 0; k < chain->count; k++) {
      const part_t *part = &checkpoint->parts[chain->first + k];
      if (!part->size || (part->live && (!part->user || part->requested > part->size)))
        return false;
      size += part->size;
    }
    if (size != chain->size)
      return false;
    parts += chain->count;
  }
  return parts == checkpoint->part_count;
}

/* ---- comparing --------------------------------------------------------------- */

static int by_address(const void *a, const void *b)
{
  uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
  return (x > y) - (x < y);
}

static bool live_are(const pool_t *pool, const uintptr_t *sorted, size_t count)
{
  size_t found = 0;
  for (const segment_t *s = pool->device->first_segment; s; s = s->next)
    for (const block_t *b = s->first; b && s->heap->pool == pool; b = b->next) {
      if (b->state != BLOCK_LIVE)
        continue;
      if (!count || !bsearch(&b->address, sorted, count, sizeof *sorted, by_address))
        return false;
      found++;
    }
  return found == count;
}

esper_status esper_pool_live_are(esper_core *core, int index, uint64_t first, uint64_t second,
                                 const void *const *ptrs, size_t count, int *same)
{
  device_t *device;
  *same = 0;
  esper_status status = core_device(core, index, &device);
  if (status != ESPER_OK)
    return status;
  uintptr_t *sorted = malloc((count + 1) * sizeof *sorted);
  if (!sorted)
    return checkpoint_no_host_memory();
  for (size_t i = 0; i < count; i++)
    sorted[i] = (uintptr_t)ptrs[i];
  qsort(sorted, count, sizeof *sorted, by_address);
  const uint64_t id[2] = {first, second};
  const pool_t *pool = checkpoint_lock_pool(device, id);
  if (pool) {
    *same = live_are(pool, sorted, count);
    unlock(&device->lock);
  }
  free(sorted);
  return pool ? ESPER_OK : checkpoint_no_pool(device, id);
}
