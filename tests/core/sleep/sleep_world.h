/* sleep_world.h: what the tests of sleep share: a world on a device that can map pages, with memory
 * under tags. */
#ifndef ESPER_SLEEP_WORLD_H
#define ESPER_SLEEP_WORLD_H

#include "core/memory/page_table.h"
#include "core/order/device.h"
#include "sleep/sleeper.h"
#include "esper_sleep.h"
#include "memory/pages_world.h"

static inline void *get_as(const char *tag, size_t size, esper_stream stream)
{
  CHECK_OK(esper_tag_push(tag));
  void *p = world_malloc(&w, size, stream);
  CHECK_OK(esper_tag_pop());
  return p;
}

/* The same, with a kernel of the stream on it. */
static inline void *used_as(const char *tag, size_t size, esper_stream stream)
{
  void *p = get_as(tag, size, stream);
  world_kernel(&w, stream, p);
  return p;
}

static inline esper_status try_sleep(const char *tag, esper_keep keep, esper_sleep_result *result)
{
  return esper_sleep(w.core, -1, tag ? &tag : NULL, tag ? 1 : 0, keep, result);
}

static inline esper_status try_wake(const char *tag)
{
  return esper_wake(w.core, -1, tag ? &tag : NULL, tag ? 1 : 0, NULL);
}

/* `tag` NULL: everything. All of it goes. */
static inline esper_sleep_result sleep_all_of(const char *tag)
{
  esper_sleep_result result;
  CHECK_OK(try_sleep(tag, ESPER_KEEP_HOST, &result));
  for (int i = 0; i < ESPER_STAYS_COUNT; i++)
    CHECK_EQ(result.stays[i], 0);
  return result;
}

static inline void wake(const char *tag)
{
  CHECK_OK(try_wake(tag));
}

static inline esper_tag_stats stats_of(const char *tag)
{
  esper_tag_stats *tags, found = {0};
  size_t count;
  CHECK_OK(esper_get_tag_stats(w.core, 0, &tags, &count));
  for (size_t i = 0; i < count; i++)
    if (!strcmp(tags[i].name, tag))
      found = tags[i];
  free(tags);
  return found;
}

#endif
