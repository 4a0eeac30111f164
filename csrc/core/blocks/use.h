/* use.h: the obligations of blocks: uses and owner order, and when they are satisfied. Under the
 * lock of the block's device. */
#ifndef ESPER_USE_H
#define ESPER_USE_H

#include "../order/capture.h"
#include "../order/record.h"
#include "block.h"

enum {
  USE_AT_FREE = 1u,       /* it lasts until the free, where its event is recorded */
  USE_READ_BY_GRAPH = 2u, /* by a graph, of memory that was not handed out in its capture */
  USE_IS_LOAN = 4u,       /* nobody marked it: the block was lent */
  USE_BY_LOAN = USE_AT_FREE | USE_IS_LOAN,
};

struct use {
  use_t *next;
  stream_t *stream;
  record_t *record;      /* NULL: none was recorded, and the use holds its block */
  uint64_t stamp;        /* held, of a freed block: the first event number that ends it; 0: none */
  capture_point_t point; /* of a use inside a capture, in place of a record */
  unsigned flags;
};

/* Adds a use, or replaces the block's use on that stream by this later one (rule 5). Takes over the
 * caller's reference to `record`. That is NULL if the event is recorded at the free (USE_AT_FREE)
 * or could not be recorded. If a new use is needed, *spare becomes it and is set to NULL. False: a
 * new use is needed and *spare is NULL; nothing has happened. */
bool use_attach(block_t *block, stream_t *stream, record_t *record, unsigned flags, use_t **spare);

/* As use_attach, for the most common mark: the block has a use with an earlier record on the
 * stream. Returns the earlier record with its reference. NULL: this is another case, and nothing
 * has happened. */
record_t *use_replace(block_t *block, record_t *record);

/* As use_attach, for a use inside a capture. Takes over the caller's reference to the point. A
 * block has at most one use for each stream outside captures, and one for each branch. */
void use_attach_point(block_t *block, capture_point_t point, use_t **spare);
/* A use that ends with the free gets its point, and takes over its reference. Several uses may then
 * be of one branch, until they are united. */
void use_set_point(use_t *use, capture_point_t point);
void uses_unite_points(device_t *device, block_t *block);

/* Sets the use's record, and takes over the caller's reference. */
void use_set_record(use_t *use, record_t *record);

/* A block that was just freed is held for a use without a record. The use gets a stamp, as owner
 * order has: an event recorded before the free does not cover it. */
void use_hold(use_t *use);
/* Gives the record to a held use if it covers that. */
void use_cover(use_t *use, record_t *record);
/* Records the events of the uses that end with the block's free, now. No lock is held: the block is
 * claimed, so its uses are the caller's alone. */
void uses_record_at_free(block_t *block);

/* Otherwise the program or an observer made the use known. */
static inline bool use_is_loan(const use_t *use)
{
  return use->flags & USE_IS_LOAN;
}

/* The number of the event that ends the use: its record's, or its stamp. 0: none is known yet. */
static inline uint64_t use_number(const use_t *use)
{
  return use->record ? use->record->number : use->stamp;
}

static inline bool use_has_number(const use_t *use)
{
  return use->record || use->stamp;
}

/* Whether the use lasts until the free, and its event is still to be recorded. */
static inline bool use_ends_at_free(const use_t *use)
{
  return use->flags & USE_AT_FREE && !use->record;
}

/* Whether a free block is held for the use, which has no event. */
static inline bool use_is_held(const use_t *use)
{
  return !use->record && !use->point.branch;
}

use_t *use_take(device_t *device); /* NULL: no host memory */
void use_give(device_t *device, use_t *use);

/* Whether the use has completed, which satisfies it for every stream. */
bool use_has_completed(const use_t *use);
/* Whether future work of `reader` is ordered after the use. */
bool use_is_satisfied(const use_t *use, const stream_t *reader);
/* Whether future work of `reader` is ordered after all uses of the block. */
bool uses_are_satisfied(const block_t *block, const stream_t *reader);
/* Whether all uses of the block have completed. */
bool uses_have_completed(const block_t *block);
/* Whether a marked use of the block is not satisfied at home: then a free block counts as
 * active. */
bool block_is_marked(const block_t *block);
/* The record that the host may wait for, so that the block comes nearer to `reader`: of a use that
 * is not satisfied, loans aside. NULL: there is none, or the block is withheld; or one has no
 * record, stands for all streams, or is on a stream that may not be awaited. */
record_t *block_awaits(const block_t *block, const stream_t *reader);

/* The stream whose use a block lent to `borrower` has: all streams, for the same reason as owner
 * order. */
stream_t *loan_stream(stream_t *borrower);
/* Stamps a block that its home stream frees now. */
void owner_order_stamp(block_t *block);
bool owner_order_has_completed(const block_t *block);
/* Whether a free block owes nothing to any stream: its uses and owner order have completed. */
bool block_owes_nothing(const block_t *block);

/* Drops the uses for which `goes` is true. */
static inline void uses_drop_if(device_t *device, block_t *block, bool (*goes)(block_t *, use_t *))
{
  for (use_t **link = &block->uses, *use; (use = *link);)
    if (goes(block, use)) {
      __atomic_store_n(link, use->next, __ATOMIC_RELAXED); /* see use_attach */
      use_give(device, use);
    } else {
      link = &use->next;
    }
}

void uses_drop_all(device_t *device, block_t *block);
static inline void uses_drop(device_t *device, block_t *block)
{
  if (block->uses)
    uses_drop_all(device, block);
}

void uses_drop_some(device_t *device, block_t *block);
static inline void uses_drop_completed(device_t *device, block_t *block)
{
  if (block->uses)
    uses_drop_some(device, block);
}

/* Drops the uses inside captures: the block's capture is over. */
void uses_drop_captured(device_t *device, block_t *block);
/* Holds the uses without a record of a block that was freed in a capture which is over. For a use
 * on another device, the block is held until that device was synchronised. */
void uses_hold_unrecorded(device_t *device, block_t *block);
/* Drops the uses without a record: the block's pool is gone, and its device was synchronised since.
 * Uses on other devices stay, because that did not wait for them. */
void uses_drop_unrecorded(device_t *device, block_t *block);
/* Moves the uses of `from` to `into`. */
void uses_unite_all(device_t *device, block_t *into, block_t *from);
static inline void uses_unite(device_t *device, block_t *into, block_t *from)
{
  if (into->uses || from->uses)
    uses_unite_all(device, into, from);
}

bool uses_are_valid(const block_t *block);

/* Whether the branch's future nodes come after all uses of the block. A use outside the branch's
 * capture is never satisfied in it. */
bool branch_is_after_all(const branch_t *branch, const block_t *block);
#endif
