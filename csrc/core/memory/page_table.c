#include "page_table.h"

#include "../base/arena.h"
#include "../blocks/block.h"

static size_t table_size(const segment_t *s)
{
  return s->size / s->device->granule * sizeof(page_t);
}

bool pages_create(segment_t *s)
{
  return (s->pages = host_map(table_size(s))) != NULL;
}

void pages_destroy(segment_t *s)
{
  host_unmap(s->pages, table_size(s));
}

page_t *page_at(const segment_t *s, uintptr_t address)
{
  page_t *entry = &s->pages[page_granule(s, address)];
  return entry->granules ? &s->pages[entry->first] : NULL;
}

void page_add(segment_t *s, uintptr_t address, size_t size, uint64_t handle)
{
  size_t first = page_granule(s, address), granules = size / s->device->granule;
  for (size_t i = first; i < first + granules; i++)
    s->pages[i] =
        (page_t){.handle = handle, .first = (uint32_t)first, .granules = (uint32_t)granules};
}

void page_store(segment_t *s, page_t page)
{
  for (size_t i = page.first; i < page.first + (size_t)page.granules; i++)
    s->pages[i] = page;
}

void page_remove(segment_t *s, page_t *page)
{
  size_t first = page->first, end = first + page->granules;
  for (size_t i = first; i < end; i++)
    s->pages[i] = (page_t){0};
}

size_t pages_within(const block_t *block, size_t enough, size_t most, uintptr_t *first)
{
  const segment_t *s = block->segment;
  size_t granule = s->device->granule, sum = 0;
  uintptr_t end = block->address + block->size;
  uintptr_t at = s->address + (block->address - s->address + granule - 1) / granule * granule;
  if (at >= end)
    return 0;
  const page_t *page = page_at(s, at);
  if (page_address(s, page) < at) /* the page begins before the block */
    at = page_address(s, page) + page_size(s, page);
  while (at < end && (page = page_at(s, at))->shared)
    at = page_address(s, page) + page_size(s, page);
  *first = at;
  while (at + sum < end && sum < enough) {
    page = page_at(s, at + sum);
    size_t size = page_size(s, page);
    if (at + sum + size > end || sum + size > most || page->shared)
      break;
    sum += size;
  }
  return sum;
}

bool pages_sleep_under(const block_t *block)
{
  const segment_t *s = block->segment;
  uintptr_t end = block->address + block->size;
  for (uintptr_t at = block->address; s->asleep && at < end;) {
    const page_t *page = page_at(s, at);
    if (page->asleep)
      return true;
    at = page_address(s, page) + page_size(s, page);
  }
  return false;
}

bool pages_are_absent_under(const block_t *block)
{
  const segment_t *s = block->segment;
  uintptr_t end = block->address + block->size;
  for (uintptr_t at = block->address; at < end;) {
    const page_t *page = page_at(s, at);
    if (!page->absent)
      return false;
    at = page_address(s, page) + page_size(s, page);
  }
  return true;
}

/* Whether free blocks on pages that sleep are so marked, and no others. */
static bool block_sleeps_rightly(const block_t *b)
{
  return block_is_live_or_claimed(b) || !block_is_mapped(b) ||
         (b->state == BLOCK_ASLEEP) == pages_sleep_under(b);
}

static bool page_is_valid(const segment_t *s, size_t at, bool stale)
{
  const page_t *page = &s->pages[s->pages[at].first];
  if (at < page->first || at >= page->first + (size_t)page->granules || page->stale != stale)
    return false;
  for (size_t i = page->first; i < page->first + (size_t)page->granules; i++)
    if (s->pages[i].first != page->first || s->pages[i].granules != page->granules ||
        s->pages[i].shared != page->shared || s->pages[i].asleep != page->asleep ||
        s->pages[i].absent != page->absent)
      return false;
  return true;
}

static bool block_has_pages(const segment_t *s, const block_t *b)
{
  size_t granule = s->device->granule;
  size_t begin = page_granule(s, b->address);
  size_t end = page_granule(s, b->address + b->size + granule - 1);
  bool has = b->state != BLOCK_HOLE;
  if (!block_is_mapped(b) && (b->address - s->address) % granule)
    return false;
  if (has && end > s->touched)
    return false;
  for (size_t i = begin; i < end && i < s->touched; i++)
    if (has ? !s->pages[i].granules || !page_is_valid(s, i, b->state == BLOCK_STALE)
            : s->pages[i].granules > 0)
      return false;
  return true;
}

bool pages_are_valid(const segment_t *s)
{
  size_t granule = s->device->granule, bytes = 0, asleep = 0, absent = 0, seen = 0;
  for (const block_t *b = s->first; b; b = b->next) {
    bytes += block_is_mapped(b) ? b->size : 0;
    if (b->state == BLOCK_FILLING) /* another thread is changing the pages of this piece */
      continue;
    if (!block_has_pages(s, b) || !block_sleeps_rightly(b))
      return false;
    size_t i = page_granule(s, b->address),
           end = page_granule(s, b->address + b->size + granule - 1);
    for (i = i > seen ? i : seen; i < end && i < s->touched; i++) {
      asleep += s->pages[i].asleep ? granule : 0;
      absent += s->pages[i].absent ? granule : 0;
    }
    seen = end;
  }
  return bytes == s->bytes && asleep == s->asleep && absent == s->absent;
}
