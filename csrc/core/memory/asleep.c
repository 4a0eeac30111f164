#include "asleep.h"

#include "../blocks/block.h"
#include "../blocks/free_blocks.h"
#include "../blocks/use.h"
#include "../pools/pool.h"
#include "../stats/stats.h"
#include "mapped.h"

static void set_asleep(segment_t *s, size_t bytes)
{
  __atomic_store_n(&s->asleep, bytes, __ATOMIC_RELAXED);
}

void asleep_set(segment_t *s, page_t page, bool asleep)
{
  size_t size = page_size(s, &page);
  page.asleep = asleep;
  set_asleep(s, asleep ? s->asleep + size : s->asleep - size);
  page_store(s, page);
}

/* Changes the figures of memory that is not on the device, in bytes. */
static void count_absent(segment_t *s, size_t gone, size_t came)
{
  esper_counters *counters = &s->device->counters;
  s->absent += gone - came;
  counters->bytes_asleep += gone - came;
  if (counters->bytes_asleep_peak < counters->bytes_asleep)
    counters->bytes_asleep_peak = counters->bytes_asleep;
}

void absent_set(segment_t *s, page_t page, bool absent)
{
  size_t size = page_size(s, &page);
  esper_stats *stats = &s->device->stats;
  page.absent = absent;
  count_absent(s, absent ? size : 0, absent ? 0 : size);
  page_store(s, page);
  if (absent)
    stats_pages_slept(stats, s->heap->pool->stats, s->large, size);
  else
    stats_pages_woke(stats, s->heap->pool->stats, s->large, size);
}

/* Finds the first absent pages that adjoin in [begin, end). Returns their bytes. */
static size_t find_absent(const segment_t *s, uintptr_t begin, uintptr_t end, uintptr_t *first)
{
  size_t size = 0;
  for (uintptr_t at = begin; at < end;) {
    const page_t *page = page_at(s, at);
    if (!page->absent && size)
      break;
    if (page->absent && !size)
      *first = page_address(s, page);
    size += page->absent ? page_size(s, page) : 0;
    at = page_address(s, page) + page_size(s, page);
  }
  return size;
}

static void drop_absent(block_t *block)
{
  segment_t *s = block->segment;
  size_t size = block->size;
  stretch_peaks_t peaks = stats_stretches_begin(&s->device->stats);
  set_asleep(s, s->asleep - size);
  count_absent(s, 0, size);
  mapped_left(block, false); /* the block may be a part of another hole now */
  stats_pages_woke(&s->device->stats, s->heap->pool->stats, s->large, size);
  stats_stretches_end(&s->device->stats, peaks);
}

void asleep_free_wakes(block_t *block)
{
  uintptr_t first = 0;
  size_t size;
  cache_close(block->segment->heap);
  block_set_state(block, BLOCK_CLAIMED);
  while (block && (size = find_absent(block->segment, block->address, block->address + block->size,
                                      &first))) {
    block_t *front = first > block->address ? block : NULL;
    block_count_inactive(block);
    uses_drop(block->segment->device, block);
    if (front)
      block = mapped_split(front, first - front->address);
    block_t *rest = block->size > size ? mapped_split(block, size) : NULL;
    drop_absent(block);
    if (front)
      free_blocks_add(front);
    block = rest;
  }
  if (block)
    free_blocks_add(block);
}

void asleep_free_blocks_wake(segment_t *s, bool all)
{
  for (block_t *b = s->first, *after; b; b = after) {
    /* A free block or a hole beside it may become one with it. */
    after = b->next;
    if (after && (after->state == BLOCK_READY || after->state == BLOCK_HOLE))
      after = after->next;
    if (b->state == BLOCK_ASLEEP && (all || !pages_sleep_under(b)))
      asleep_free_wakes(b);
  }
}
