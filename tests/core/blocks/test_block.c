/* Single blocks: how they split and merge, and what they owe then. */
#include "core/blocks/block.h"

#include "core/blocks/block_cache.h"
#include "core/blocks/map.h"
#include "core/blocks/use.h"
#include "world.h"

static world w;
static device_t *device;
static segment_t segment;
static heap_t heap; /* its cache is closed */

static block_t *begin(void)
{
  world_begin(&w);
  world_free(&w, world_malloc(&w, 512, w.stream[0])); /* the device starts */
  device = &w.core->devices[0];
  cache_init(&heap.cache);
  segment = (segment_t){.address = 0x1000000, .size = 1 << 20, .heap = &heap};
  segment.first = block_create(device, &segment, segment.address, segment.size);
  CHECK(segment.first);
  CHECK_EQ(segment.first->state, BLOCK_CLAIMED);
  CHECK(map_find(w.core->map, segment.address) == segment.first);
  CHECK(!segment.first->prev && !segment.first->next);
  return segment.first;
}

static void end(void)
{
  while (segment.first) {
    block_t *block = segment.first;
    segment.first = block->next;
    block_destroy(device, block);
  }
  world_end(&w);
}

/* A use without a record, told by its stream. */
static void owe(block_t *block, stream_t *stream, unsigned flags)
{
  use_t *use = use_take(device);
  use_attach(block, stream, NULL, flags, &use);
  if (use)
    use_give(device, use);
}

static int uses_of(const block_t *block, const stream_t *stream)
{
  int count = 0;
  for (const use_t *use = block->uses; use; use = use->next)
    count += use->stream == stream;
  return count;
}

static stream_t *any_stream(int i)
{
  stream_t *s = atomic_load(&w.core->streams);
  while (i--)
    s = s->next;
  return s;
}

TEST(a_merge_unites_the_uses_and_takes_the_later_stamp)
{
  block_t *a = begin(), *b = block_split(device, a, 4096);
  world_free(&w, world_malloc(&w, 512, w.stream[1]));
  stream_t *s = any_stream(0), *t = any_stream(1);
  owe(a, s, 0);
  owe(b, s, USE_READ_BY_GRAPH);
  owe(b, t, 0);
  a->stamp = 3;
  b->stamp = 9;
  block_merge_next(device, a);
  CHECK_EQ(uses_of(a, s), 1);
  CHECK_EQ(uses_of(a, t), 1);
  CHECK_EQ(a->stamp, 9);
  for (const use_t *use = a->uses; use; use = use->next)
    if (use->stream == s)
      CHECK(use->flags & USE_READ_BY_GRAPH); /* the stricter */
  CHECK(uses_are_valid(a));
  end();
}

TEST(broken_blocks_are_noticed)
{
  block_t *a = begin(), *b = block_split(device, a, 4096);
  CHECK(block_is_valid(a));
  a->size = 1000;
  CHECK(!block_is_valid(a));
  a->size = 8192; /* overlaps */
  CHECK(!block_is_valid(b));
  a->size = 4096;
  a->state = b->state = BLOCK_READY; /* should have merged */
  CHECK(!block_is_valid(a));
  a->state = b->state = BLOCK_CLAIMED;
  CHECK(block_is_valid(a) && block_is_valid(b));
  end();
}
