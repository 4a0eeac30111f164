#include "pending_index.h"

#include "../order/stream.h"
#include "block.h"
#include "use.h"

/* One that bars gates goes before others; NULL: nothing is missing. */
static const use_t *awaited_use(const block_t *block)
{
  const stream_t *home = block->segment->heap->stream;
  const use_t *first = NULL;
  for (const use_t *use = block->uses; use; use = use->next) {
    if (use_is_satisfied(use, home))
      continue;
    if (use_is_barred(use))
      return use;
    if (!first)
      first = use;
  }
  return first;
}

static void set_barred(pending_index_t *waits, block_t *block, bool barred)
{
  size_t *count = &waits->barred[block->segment->large];
  *count = *count - block->barred + barred;
  block->barred = barred;
}

/* NULL: none. */
static awaited_t *wait_for(pending_index_t *waits, const stream_t *stream)
{
  for (unsigned i = 0; i < waits->count; i++)
    if (waits->on[i].stream == stream)
      return &waits->on[i];
  return NULL;
}

static void await(pending_index_t *waits, const use_t *use)
{
  uint64_t number = use->record->number;
  awaited_t *wait = wait_for(waits, use->stream);
  if (wait && wait->from > number)
    wait->from = number;
  else if (!wait && waits->count < INDEXED_STREAMS)
    waits->on[waits->count++] = (awaited_t){use->stream, number};
  else if (!wait)
    waits->unknown = true;
}

void pending_index_add(heap_t *heap, block_t *block)
{
  const use_t *use = awaited_use(block);
  set_barred(&heap->pending_index, block, use && use_is_barred(use));
  if (block->withheld)
    return; /* until the pool is sealed */
  /* What is held gets its record some day. Inside a capture edges count, and no events. */
  if (!use || !use->record || heap->capture)
    heap->pending_index.unknown = true;
  else
    await(&heap->pending_index, use);
}

/* Where a stream gates on the oldest block each time, nothing else becomes ready: others
 * that wait for the same record would refer to it. */
void pending_index_remove(heap_t *heap, block_t *block)
{
  set_barred(&heap->pending_index, block, false);
  for (const use_t *use = block->uses; use; use = use->next) {
    awaited_t *wait = use->record ? wait_for(&heap->pending_index, use->stream) : NULL;
    if (wait && wait->from == use->record->number && atomic_load(&use->record->references) == 1)
      wait->from++;
  }
}

static bool is_over(const heap_t *heap, const awaited_t *wait)
{
  return stream_completed(wait->stream, wait->from) ||
         stream_is_after(heap->stream, wait->stream, wait->from);
}

bool pending_index_may_be_ready(const heap_t *heap)
{
  const pending_index_t *waits = &heap->pending_index;
  bool over = waits->unknown;
  for (unsigned i = 0; i < waits->count && !over; i++)
    over = is_over(heap, &waits->on[i]);
  return over;
}

void pending_index_clear(heap_t *heap)
{
  heap->pending_index.count = 0;
  heap->pending_index.unknown = false;
}

/* That a use is over shows a moment before the epoch does, and one that was held may owe
 * more when it gets its record; so what is asked is whether the heap would hear of it. */
bool pending_index_is_valid(const block_t *block)
{
  const heap_t *heap = block->segment->heap;
  if (block->withheld || heap->pending_index.unknown)
    return true;
  for (const use_t *use = block->uses; use; use = use->next)
    for (unsigned i = 0; use->record && i < heap->pending_index.count; i++)
      if (heap->pending_index.on[i].stream == use->stream &&
          heap->pending_index.on[i].from <= use->record->number)
        return true;
  return false;
}
