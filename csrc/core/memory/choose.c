#include "choose.h"

#include "../base/error.h"
#include "../blocks/free_blocks.h"
#include "../blocks/use.h"

/* Inside this file, beside the reasons of esper_stays. */
enum { GOES = -1, SLEEPS_ALREADY = -2 };

/* Pages and parcels for which the lists are not large enough yet. */
typedef struct missing {
  size_t pages[TAGS], parcels[TAGS];
  bool any;
} missing_t;

/* Everything enqueued before has completed, but a block may have been freed since. Points of
 * captures never complete outside, so they do not count. */
static bool owes_what_matters(const block_t *block)
{
  bool owes = !owner_order_has_completed(block);
  for (const use_t *use = block->uses; use; use = use->next)
    owes |= !use_has_completed(use) && !use->point.branch && !(use->flags & USE_READ_BY_GRAPH);
  return owes && RULE(SLEEP_NEEDS_COMPLETION);
}

static bool may_sleep(const block_t *block)
{
  block_state state = block_state_of(block);
  return state == BLOCK_LIVE || state == BLOCK_ASLEEP ||
         (block_is_in_bin(block) && !owes_what_matters(block));
}

/* GOES, SLEEPS_ALREADY, or the reason why the page stays. `block` is the first on the page. */
static int reason_of(const segment_t *s, const page_t *page, const block_t *block)
{
  uintptr_t end = page_address(s, page) + page_size(s, page);
  if (page->asleep)
    return SLEEPS_ALREADY;
  if (page->shared)
    return ESPER_STAYS_SHARED;
  if (s->pinned)
    return ESPER_STAYS_PINNED;
  for (const block_t *b = block; b && b->address < end; b = b->next)
    if (!may_sleep(b))
      return ESPER_STAYS_IN_USE;
  return GOES;
}

/* A replay may leave in a graph's free memory what the next one reads, so all of that is kept. */
static bool is_kept(const choice_t *c, const block_t *block)
{
  return c->keeps && (block_state_of(block) == BLOCK_LIVE ||
                      (block->segment->captured && RULE(SLEEP_KEEPS_GRAPHS)));
}

/* Finds the bytes of a page that are kept, as few parcels. `parcels` may be NULL. */
static size_t find_parcels(const choice_t *c, uintptr_t begin, uintptr_t end, const block_t *block,
                           parcel_t *parcels)
{
  size_t count = 0;
  uintptr_t last_end = 0;
  for (const block_t *b = block; b && b->address < end; b = b->next) {
    uintptr_t from = b->address > begin ? b->address : begin;
    uintptr_t to = b->address + b->size < end ? b->address + b->size : end;
    if (!is_kept(c, b))
      continue;
    bool joins = from == last_end;
    last_end = to;
    if (!joins)
      count++;
    if (parcels && joins)
      parcels[count - 1].size += to - from;
    else if (parcels)
      parcels[count - 1] = (parcel_t){from, to - from, 0};
  }
  return count;
}

static void put_to_sleep(const choice_t *c, segment_t *s, page_t page, block_t *block)
{
  sleeping_t *list = c->of[s->heap->tag];
  uintptr_t begin = page_address(s, &page), end = begin + page_size(s, &page);
  parcel_t *parcels = &list->parcels[list->parcel_count];
  size_t count = find_parcels(c, begin, end, block, parcels);
  for (size_t i = 0; i < count; i++) {
    parcels[i].offset = list->kept;
    list->kept += parcels[i].size;
  }
  list->parcel_count += count;
  list->pages[list->page_count++] =
      (sleeping_page_t){.segment = s, .first = page.first, .parcels = count};
  page.empty = !c->keeps;
  asleep_set(s, page, true);
  for (block_t *b = block; b && b->address < end; b = b->next)
    if (block_is_in_bin(b) && RULE(ASLEEP_SERVES_NOTHING)) {
      free_blocks_claim(b);
      block_set_state(b, BLOCK_ASLEEP);
    }
}

/* `block` is the first on the page. */
static void look_at_page(const choice_t *c, segment_t *s, const page_t *page, block_t *block,
                         missing_t *missing)
{
  tag_t tag = s->heap->tag;
  const sleeping_t *list = c->of[tag];
  uintptr_t begin = page_address(s, page), end = begin + page_size(s, page);
  int reason = reason_of(s, page, block);
  if (reason >= 0)
    c->result->stays[reason] += end - begin;
  if (reason != GOES)
    return;
  missing->pages[tag]++;
  missing->parcels[tag] += find_parcels(c, begin, end, block, NULL);
  bool fits = list && missing->pages[tag] <= list->page_capacity - list->page_count &&
              missing->parcels[tag] <= list->parcel_capacity - list->parcel_count;
  if (!fits) {
    missing->any = true;
    return;
  }
  put_to_sleep(c, s, *page, block);
  missing->pages[tag] = missing->parcels[tag] = 0;
}

/* Each page lies in one stretch of blocks that have memory, and is looked at from the first block
 * on it. */
static void look_at_segment(const choice_t *c, segment_t *s, missing_t *missing)
{
  uintptr_t seen = s->address; /* all pages before it were looked at */
  for (block_t *b = s->first; b; b = b->next) {
    uintptr_t at = b->address > seen ? b->address : seen;
    while (block_is_mapped(b) && at < b->address + b->size) {
      const page_t *page = page_at(s, at);
      seen = at = page_address(s, page) + page_size(s, page);
      look_at_page(c, s, page, b, missing);
    }
  }
}

static void look(const choice_t *c, missing_t *missing)
{
  for (int i = 0; i < ESPER_STAYS_COUNT; i++)
    c->result->stays[i] = 0;
  *missing = (missing_t){0};
  lock(&c->device->lock);
  caches_close(c->device);
  for (segment_t *s = c->device->first_segment; s; s = s->next) {
    if (!c->tags[s->heap->tag])
      continue;
    if (s->pages)
      look_at_segment(c, s, missing);
    else
      c->result->stays[ESPER_STAYS_CLASSIC] += s->bytes;
  }
  unlock(&c->device->lock);
}

static bool reserve_missing(choice_t *c, const missing_t *missing)
{
  for (unsigned tag = 0; tag < TAGS; tag++) {
    if (!missing->pages[tag])
      continue;
    if (!c->of[tag] && !(c->of[tag] = c->list(c->device, (tag_t)tag)))
      return false;
    if (!sleeping_reserve(c->of[tag], missing->pages[tag], missing->parcels[tag]))
      return false;
  }
  return true;
}

/* No other thread hands pages to a process meanwhile, so none that is about to be shared is
 * chosen. */
esper_status choose_pages(choice_t *c)
{
  missing_t missing;
  esper_status status = ESPER_OK;
  lock(&c->device->growth_lock);
  for (look(c, &missing); missing.any && status == ESPER_OK; look(c, &missing))
    if (!reserve_missing(c, &missing))
      status = error_set(ESPER_HOST_MEMORY, "no host memory for a list of pages");
  unlock(&c->device->growth_lock);
  return status;
}
