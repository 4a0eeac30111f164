/* tags.c: the figures of tags and of what sleeps. */
#include "../../esper_sleep.h"

#include <stdlib.h>

#include "../base/error.h"
#include "../base/tag.h"
#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../memory/asleep.h"
#include "../order/device.h"

static void add_segment(const segment_t *s, esper_tag_stats *of)
{
  of->reserved += s->bytes - s->absent;
  of->sleeping += s->absent;
  for (const block_t *b = s->first; b; b = b->next)
    of->allocated += block_state_of(b) == BLOCK_LIVE ? b->size : 0;
}

/* Leaves out the tags without memory. */
static size_t pack(esper_tag_stats *tags, unsigned end)
{
  size_t count = 0;
  for (unsigned i = 0; i < end; i++)
    if (tags[i].reserved || tags[i].sleeping || tags[i].host || tags[i].asleep) {
      tags[count] = tags[i];
      tags[count++].name = tag_name((tag_t)i);
    }
  return count;
}

esper_status esper_get_tag_stats(esper_core *core, int device_index, esper_tag_stats **tags,
                                 size_t *count)
{
  device_t *device;
  *tags = NULL;
  *count = 0;
  esper_status status = core_used_device(core, device_index, &device);
  if (!device)
    return status;
  esper_tag_stats *all = calloc(TAGS, sizeof *all);
  if (!all)
    return error_set(ESPER_HOST_MEMORY, "no host memory for the figures of %d tags", TAGS);
  lock(&device->lock);
  for (const sleeping_t *s = device->sleeping; s; s = s->next)
    all[s->tag].host += atomic_load(&s->host);
  caches_close(device);
  for (const segment_t *s = device->first_segment; s; s = s->next)
    add_segment(s, &all[s->heap->tag]);
  for (int i = 0; i < TAGS; i++)
    all[i].asleep = device->asleep[i];
  unlock(&device->lock);
  *tags = all;
  *count = pack(all, TAGS);
  return ESPER_OK;
}

size_t esper_pool_asleep(esper_core *core, int index, uint64_t id_first, uint64_t id_second)
{
  size_t bytes = 0;
  bool any = atomic_load(&core->asleep) > 0; /* a replay asks each time */
  for (int i = 0; any && i < core->device_count; i++) {
    device_t *device = &core->devices[i];
    if (index >= 0 && i != index)
      continue;
    lock(&device->lock);
    for (const segment_t *s = device->first_segment; s; s = s->next) {
      const uint64_t *id = s->heap->pool_id;
      bytes += id[0] == id_first && id[1] == id_second ? s->asleep : 0;
    }
    unlock(&device->lock);
  }
  return bytes;
}
