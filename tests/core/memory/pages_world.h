/* pages_world.h: what the tests of mapped segments share: a world on a device that can map
 * pages. */
#ifndef ESPER_PAGES_WORLD_H
#define ESPER_PAGES_WORLD_H

#include "core/base/core.h"
#include "core/base/types.h"
#include "core/blocks/block.h"
#include "one_world.h"

/* A device that can map pages and has `mib` MiB. */
static inline void begin_with(size_t mib, const esper_config *config)
{
  begin_on((sim_options){WHEN_TOLD, .virtual_memory = 1, .capacity = mib * MIB},
           config ? config
                  : &(esper_config){.large_segment_size = 20 * MIB,
                                    .segments = ESPER_SEGMENTS_MAPPED});
}

static inline void begin(void)
{
  begin_with(256, NULL);
}

static inline void begin_fenced(size_t mib)
{
  begin_with(mib, NULL);
  CHECK_OK(esper_fence(w.core, 1));
}

static inline bool is_fenced(const void *p)
{
  esper_block_info info;
  CHECK_OK(esper_find_block(w.core, p, &info));
  return info.fenced;
}

static inline void *get(size_t mib, esper_stream stream)
{
  return world_malloc(&w, mib * MIB, stream);
}

/* The same, with a kernel of the stream on it. */
static inline void *used(size_t mib, esper_stream stream)
{
  void *p = get(mib, stream);
  world_kernel(&w, stream, p);
  return p;
}

/* `count` blocks one after the other, every other one of which is freed, and
 * nothing is owed. */
enum { MOST = 32 };
__attribute__((unused)) static void *pieces[MOST];
static inline void comb(size_t mib, int count, esper_stream stream)
{
  for (int i = 0; i < count; i++)
    pieces[i] = used(mib, stream);
  world_run(&w, stream);
  for (int i = 0; i < count; i += 2)
    world_free(&w, pieces[i]);
}

static inline segment_t *first_segment(void)
{
  return w.core->devices[0].first_segment;
}

#endif
