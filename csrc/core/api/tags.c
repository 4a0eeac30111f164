/* tags.c: the public functions that report about tags. */
#include "../../esper_sleep.h"

#include <stdlib.h>

#include "../base/error.h"
#include "../base/tag.h"
#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../order/device.h"

static void add_segment(const segment_t *s, esper_tag_stats *of)
{
  of->reserved += s->bytes;
  for (const block_t *b = s->first; b; b = b->next)
    of->allocated += block_state_of(b) == BLOCK_LIVE ? b->size : 0;
}

/* Leaves out the tags without memory. */
static size_t pack(esper_tag_stats *tags, unsigned end)
{
  size_t count = 0;
  for (unsigned i = 0; i < end; i++)
    if (tags[i].reserved) {
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
  caches_close(device);
  for (const segment_t *s = device->first_segment; s; s = s->next)
    add_segment(s, &all[s->heap->tag]);
  unlock(&device->lock);
  *tags = all;
  *count = pack(all, TAGS);
  return ESPER_OK;
}
