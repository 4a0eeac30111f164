#include "use.h"

#include "../order/capture.h"
#include "../order/host_wait.h"
#include "../order/record.h"
#include "../order/stream.h"
#include "block.h"
#include "heap.h"

/* Empty, so that use_give can take it back unused. */
use_t *use_take(device_t *device)
{
  use_t *use = arena_take(&device->uses);
  if (use)
    *use = (use_t){0};
  return use;
}

void use_give(device_t *device, use_t *use)
{
  if (use->record)
    record_drop(use->record);
  capture_point_drop(&use->point);
  arena_give(&device->uses, use);
}

void use_set_record(use_t *use, record_t *record)
{
  if (use->record)
    record_drop(use->record);
  use->record = record;
}

void use_hold(use_t *use)
{
  use->stamp = stream_stamp(use->stream);
  atomic_store(&use->stream->holds, true);
}

void use_cover(use_t *use, record_t *record)
{
  if (use->stream != record->stream || use->record || !use->stamp || record->number < use->stamp)
    return;
  record_keep(record);
  use->record = record;
}

void uses_record_at_free(block_t *block)
{
  for (use_t *use = block->uses; use; use = use->next)
    if (use_ends_at_free(use))
      use->record = stream_record_unpresented(use->stream);
}

/* The block's use on a stream outside captures (`branch` NULL), or on a branch. */
static use_t *use_on(const block_t *block, const stream_t *stream, const branch_t *branch)
{
  use_t *use = block->uses;
  while (use && (use->stream != stream || use->point.branch != branch))
    use = use->next;
  return use;
}

bool use_has_completed(const use_t *use)
{
  uint64_t number = use_number(use);
  return number && stream_completed(use->stream, number);
}

/* Keeps the later of the use's record and this one, and takes over the reference. */
static void use_take_later(use_t *use, record_t *record)
{
  if (use->record->number < record->number)
    use_set_record(use, record);
  else
    record_drop(record);
}

/* The flags of two uses that become one. It is a loan only if both are. */
static unsigned flags_unite(unsigned a, unsigned b)
{
  return ((a | b) & ~USE_IS_LOAN) | (a & b & USE_IS_LOAN);
}

/* A live block's use is followed by a later one on the same stream. An event at the free will be
 * later than any other. A use that could not be recorded stays unrecorded. */
static void use_follow(use_t *use, record_t *record, unsigned flags)
{
  use->flags = use_has_completed(use) ? flags : flags_unite(flags, use->flags);
  if (use->flags & USE_AT_FREE || !record) {
    use_set_record(use, NULL);
    atomic_store_explicit(&use->stream->kept, true, memory_order_release);
  }
  if (record && use->record)
    use_take_later(use, record);
  else if (record)
    record_drop(record);
}

bool use_attach(block_t *block, stream_t *stream, record_t *record, unsigned flags, use_t **spare)
{
  use_t *use = RULE(ONE_USE_A_STREAM) ? use_on(block, stream, NULL) : NULL;
  if (use) {
    if (RULE(LATER_USE_REPLACES))
      use_follow(use, record, flags);
    else if (record)
      record_drop(record);
    return true;
  }
  use = *spare;
  if (!use)
    return false;
  *spare = NULL;
  if (!record)
    atomic_store_explicit(&stream->kept, true, memory_order_release);
  *use = (use_t){.next = block->uses, .stream = stream, .record = record, .flags = flags};
  __atomic_store_n(&block->uses, use, __ATOMIC_RELAXED); /* cache_free reads it without the lock */
  return true;
}

record_t *use_replace(block_t *block, record_t *record)
{
  use_t *use = use_on(block, record->stream, NULL);
  if (!use || !use->record || use->record->number > record->number)
    return NULL;
  if (!RULE(ONE_USE_A_STREAM) || !RULE(LATER_USE_REPLACES))
    return NULL;
  record_t *replaced = use->record;
  use->flags = use_has_completed(use) ? 0 : flags_unite(0, use->flags);
  use->record = record;
  return replaced;
}

static void point_take_later(capture_point_t *point, capture_point_t other)
{
  if (other.number > point->number) {
    capture_point_t earlier = *point;
    *point = other;
    other = earlier;
  }
  capture_point_drop(&other);
}

void use_attach_point(block_t *block, capture_point_t point, use_t **spare)
{
  stream_t *stream = point.branch->stream;
  use_t *use = use_on(block, stream, point.branch);
  if (use) {
    point_take_later(&use->point, point);
    return;
  }
  use = *spare;
  *spare = NULL;
  *use = (use_t){.next = block->uses, .stream = stream, .point = point};
  block->uses = use;
}

void use_set_point(use_t *use, capture_point_t point)
{
  capture_point_drop(&use->point);
  use->point = point;
}

bool use_is_satisfied(const use_t *use, const stream_t *reader)
{
  if (!use->record)
    return use_has_completed(use) || !RULE(UNRECORDED_HOLDS);
  return use->stream == reader || use_has_completed(use);
}

bool uses_are_satisfied(const block_t *block, const stream_t *reader)
{
  for (const use_t *use = block->uses; use; use = use->next)
    if (!use_is_satisfied(use, reader))
      return false;
  return true;
}

bool uses_have_completed(const block_t *block)
{
  for (const use_t *use = block->uses; use; use = use->next)
    if (!use_has_completed(use) && (use->record || RULE(UNRECORDED_HOLDS)))
      return false;
  return true;
}

bool block_is_marked(const block_t *block)
{
  const stream_t *home = block->segment->heap->stream;
  for (const use_t *use = block->uses; use; use = use->next)
    if (!use_is_loan(use) && !use_is_satisfied(use, home))
      return true;
  return false;
}

record_t *block_awaits(const block_t *block, const stream_t *reader)
{
  record_t *first = NULL;
  for (const use_t *use = block->withheld ? NULL : block->uses; use; use = use->next) {
    if (use_is_loan(use) || use_is_satisfied(use, reader))
      continue;
    if (!use->record || use->stream->all_streams || !stream_may_be_awaited(use->stream))
      return NULL; /* to wait for the others would not free it */
    if (!first)
      first = use->record;
  }
  return first;
}

stream_t *loan_stream(stream_t *borrower)
{
  return RULE(LATE_WAITS_COUNT) ? borrower->device->all_streams : borrower;
}

void owner_order_stamp(block_t *block)
{
  const heap_t *heap = block->segment->heap;
  if (block_is_of(block, heap->stream))
    block->stamp = stream_stamp(owner_order_stream(heap));
}

bool owner_order_has_completed(const block_t *block)
{
  return !block->stamp || stream_completed(owner_order_stream(block->segment->heap), block->stamp);
}

bool block_owes_nothing(const block_t *block)
{
  return uses_have_completed(block) && owner_order_has_completed(block);
}

void uses_drop_all(device_t *device, block_t *block)
{
  while (block->uses) {
    use_t *use = block->uses;
    block->uses = use->next;
    use_give(device, use);
  }
}

static bool goes_if_completed(block_t *block, use_t *use)
{
  (void)block;
  return use_has_completed(use) && RULE(COMPLETED_USES_LEAVE);
}

void uses_drop_some(device_t *device, block_t *block)
{
  uses_drop_if(device, block, goes_if_completed);
}

static bool goes_if_captured(block_t *block, use_t *use)
{
  (void)block;
  return use->point.branch;
}

void uses_drop_captured(device_t *device, block_t *block)
{
  uses_drop_if(device, block, goes_if_captured);
}

/* Holds the use until its device was synchronised, because nothing tells which streams the replays
 * run on. False: the block has such a use already; the caller drops this one. */
static bool use_hold_for_device(block_t *block, use_t *use)
{
  stream_t *all = use->stream->device->all_streams;
  use_t *same = use_on(block, all, NULL);
  bool stays = !same || same == use;
  if (!same) {
    use_set_point(use, (capture_point_t){0});
    use->stream = all;
    same = use;
  }
  use_set_record(same, NULL);
  use_hold(same);
  return stays;
}

static bool is_elsewhere(const block_t *block, const use_t *use)
{
  return use->stream->device != block->segment->device && RULE(RELEASE_NEEDS_COMPLETION);
}

static bool goes_or_is_held(block_t *block, use_t *use)
{
  if (use_has_number(use))
    return false;
  if (is_elsewhere(block, use))
    return !use_hold_for_device(block, use);
  use_hold(use);
  return false;
}

void uses_hold_unrecorded(device_t *device, block_t *block)
{
  uses_drop_if(device, block, goes_or_is_held);
}

static bool goes_if_unrecorded(block_t *block, use_t *use)
{
  if (use->record)
    return false;
  return !is_elsewhere(block, use) || (!use_has_number(use) && !use_hold_for_device(block, use));
}

void uses_drop_unrecorded(device_t *device, block_t *block)
{
  uses_drop_if(device, block, goes_if_unrecorded);
}

/* Makes two uses one held use, which is over when both are. A use with a record counts by that,
 * because its stamp may be older: of a time when the use was held. */
static void use_hold_for_both(use_t *use, const use_t *other)
{
  bool never = !use_has_number(use) || !use_has_number(other);
  uint64_t a = use_number(use), b = use_number(other);
  use->stamp = never ? 0 : a > b ? a : b;
  use_set_record(use, NULL);
}

static void point_unite(capture_point_t *into, capture_point_t *from)
{
  point_take_later(into, *from);
  *from = (capture_point_t){0};
}

void uses_unite_points(device_t *device, block_t *block)
{
  for (use_t *use = block->uses; use; use = use->next)
    for (use_t **link = &use->next; use->point.branch && *link;) {
      use_t *other = *link;
      if (other->point.branch == use->point.branch) {
        *link = other->next;
        use->flags = flags_unite(use->flags, other->flags);
        point_unite(&use->point, &other->point);
        use_give(device, other);
      } else {
        link = &other->next;
      }
    }
}

void uses_unite_all(device_t *device, block_t *into, block_t *from)
{
  /* A held use may have completed since anybody looked. */
  uses_drop_completed(device, into);
  uses_drop_completed(device, from);
  while (from->uses) {
    use_t *use = from->uses;
    from->uses = use->next;
    use_t *same = RULE(ONE_USE_A_STREAM) ? use_on(into, use->stream, use->point.branch) : NULL;
    if (!RULE(MERGE_UNITES_USES)) {
      use_give(device, use);
    } else if (same) {
      same->flags = flags_unite(same->flags, use->flags);
      if (same->point.branch) {
        point_unite(&same->point, &use->point);
      } else if (same->record && use->record) {
        record_keep(use->record);
        use_take_later(same, use->record);
      } else {
        use_hold_for_both(same, use);
      }
      use_give(device, use);
    } else {
      use->next = into->uses;
      into->uses = use;
    }
  }
}

/* Whether the block has a use that lasts until the free for each stream that it noted. */
static bool notes_are_valid(const block_t *block)
{
  core_t *core = block->segment->device->core;
  for (uint32_t left = block->noted; left; left &= left - 1) {
    const use_t *use = use_on(block, stream_at(core, (unsigned)__builtin_ctz(left)), NULL);
    if (!use || !use_ends_at_free(use))
      return false;
  }
  return true;
}

bool uses_are_valid(const block_t *block)
{
  if (block->state == BLOCK_LIVE && !notes_are_valid(block))
    return false;
  for (const use_t *use = block->uses; use; use = use->next) {
    if (use->record && use->record->stream != use->stream)
      return false;
    if (use->point.branch && (use->record || use->point.branch->stream != use->stream))
      return false;
    for (const use_t *other = use->next; other; other = other->next)
      if (other->stream == use->stream && other->point.branch == use->point.branch)
        return false;
  }
  return true;
}

/* ---- inside a capture ------------------------------------------------------- */

bool branch_is_after_all(const branch_t *b, const block_t *block)
{
  for (const use_t *use = block->uses; use; use = use->next)
    if (!branch_is_after(b, &use->point))
      return false;
  return true;
}
