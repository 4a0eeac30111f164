/* tags.c: the public functions of tags, sleep and wake. */
#include "../../esper_sleep.h"

#include <stdlib.h>

#include "../base/error.h"
#include "../base/tag.h"
#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../order/device.h"
#include "../sleep/sleep.h"
#include "../sleep/sleeper.h"
#include "../sleep/wake.h"

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
  for (const sleeper_t *s = device->sleepers; s; s = s->next)
    all[s->tag].host += atomic_load(&s->pinned.bytes);
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

/* ---- sleep and wake ----------------------------------------------------- */

/* `tags` NULL: all tags that there are now. */
static esper_status choose(const char *const *tags, size_t count, bool chosen[TAGS])
{
  for (unsigned i = 0; i < TAGS; i++)
    chosen[i] = !tags && i < tag_count();
  for (size_t i = 0; tags && i < count; i++) {
    if (!tags[i])
      return error_set(ESPER_INVALID,
                       "tag %zu of %zu has no name: pass \"\" for memory without a tag", i + 1,
                       count);
    int tag = *tags[i] ? tag_find(tags[i]) : TAG_NONE;
    if (tag < 0)
      return error_set(ESPER_INVALID, "there is no tag '%s': no memory was ever allocated under it",
                       tags[i]);
    chosen[tag] = true;
  }
  return ESPER_OK;
}

esper_status esper_sleep(esper_core *core, int index, const char *const *tags, size_t count,
                         esper_keep keep, esper_sleep_result *result)
{
  bool chosen[TAGS];
  device_t *only = NULL;
  esper_sleep_result sum = {0};
  if (keep != ESPER_KEEP_HOST && keep != ESPER_KEEP_NOTHING)
    return error_set(ESPER_INVALID, "keep is %d: use ESPER_KEEP_HOST or ESPER_KEEP_NOTHING",
                     (int)keep);
  esper_status status = choose(tags, count, chosen);
  if (status == ESPER_OK && index != -1)
    status = core_used_device(core, index, &only);
  if (status == ESPER_OK && (index == -1 || only))
    status = sleep_devices(core, only, chosen, keep, &sum);
  if (status == ESPER_OK && result)
    *result = sum;
  return status;
}

esper_status esper_wake(esper_core *core, int index, const char *const *tags, size_t count,
                        size_t *woken)
{
  bool chosen[TAGS];
  device_t *only = NULL;
  size_t bytes = 0;
  esper_status status = choose(tags, count, chosen);
  if (status == ESPER_OK && index != -1)
    status = core_used_device(core, index, &only);
  for (int i = 0; i < core->device_count && status == ESPER_OK; i++) {
    device_t *device = &core->devices[i];
    if (index == -1 ? atomic_load(&device->ready) : device == only)
      status = wake_device(device, chosen, &bytes);
  }
  if (status == ESPER_OK && woken)
    *woken = bytes;
  return status;
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

void esper_sleep_trim(esper_core *core)
{
  for (int i = 0; i < core->device_count; i++) {
    lock(&core->devices[i].sleep_lock);
    sleepers_trim(&core->devices[i], false);
    unlock(&core->devices[i].sleep_lock);
  }
}

const char *esper_stays_advice(esper_stays reason)
{
  switch (reason) {
  case ESPER_STAYS_CLASSIC:
    return "in classic segments, which the driver gives and takes whole: ask for mapped ones "
           "(ESPER_ALLOC_SEGMENTS=mapped), and use no MemPool with an allocator of its own";
  case ESPER_STAYS_SHARED:
    return "shared with other processes: let them close it, and free it here";
  case ESPER_STAYS_PINNED: return "pinned, because its addresses are known elsewhere: unpin it";
  case ESPER_STAYS_IN_USE:
    return "in use by another thread's call, or by work that was enqueued meanwhile: let no thread "
           "allocate, free or launch while memory goes to sleep";
  case ESPER_STAYS_COUNT: break;
  }
  return "unknown reason";
}
