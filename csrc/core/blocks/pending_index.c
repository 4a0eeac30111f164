#include "pending_index.h"

#include "../order/stream.h"
#include "block.h"
#include "use.h"

/* An unsatisfied use of the block. NULL: it has none. */
static const use_t *awaited_use(const block_t *block)
{
  const stream_t *home = block->segment->heap->stream;
  const use_t *use = block->uses;
  while (use && use_is_satisfied(use, home))
    use = use->next;
  return use;
}

/* The entry for the stream, or NULL. */
static awaited_t *wait_for(pending_index_t *index, const stream_t *stream)
{
  for (unsigned i = 0; i < index->count; i++)
    if (index->on[i].stream == stream)
      return &index->on[i];
  return NULL;
}

static void await(pending_index_t *index, const use_t *use)
{
  if (!use || !use->record) {
    index->unknown = true; /* a held use may get its record at any time */
    return;
  }
  uint64_t number = use->record->number;
  awaited_t *wait = wait_for(index, use->stream);
  if (wait && wait->from > number)
    wait->from = number;
  else if (!wait && index->count < INDEXED_STREAMS)
    index->on[index->count++] = (awaited_t){use->stream, number};
  else if (!wait)
    index->unknown = true;
}

void pending_index_add(heap_t *heap, block_t *block)
{
  const use_t *use = awaited_use(block);
  /* A withheld block waits for the pool's next quiesce. Inside a capture edges count, not
   * events. */
  if (!block->withheld)
    await(&heap->pending_index, heap->capture ? NULL : use);
  /* The statistics count the block as active until its uses, loans aside, are over. */
  if (block->counted_active && use && (block->withheld || use_is_loan(use)))
    for (const use_t *other = block->uses; other; other = other->next)
      if (!use_is_loan(other) && !use_is_satisfied(other, heap->stream))
        await(&heap->pending_index, other);
}

bool pending_index_may_be_ready(const heap_t *heap)
{
  const pending_index_t *index = &heap->pending_index;
  bool over = index->unknown;
  for (const awaited_t *wait = index->on; wait < index->on + index->count && !over; wait++)
    over = stream_completed(wait->stream, wait->from);
  return over;
}

void pending_index_clear(heap_t *heap)
{
  heap->pending_index.count = 0;
  heap->pending_index.unknown = false;
}

/* That the block still waits cannot be checked: a use may be over a moment before core->progress
 * rises, and a held use may get its record later. */
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
