/* use.h: what blocks owe. All of it under the lock of the block's device. */
#ifndef ESPER_USE_H
#define ESPER_USE_H

#include "../order/capture.h"
#include "../order/record.h"
#include "block.h"

enum {
  USE_AT_FREE = 1u,  /* record_stream: the event is recorded at the free */
  USE_NO_GATE = 2u,  /* depends, maybe, on work not yet enqueued */
  USE_CAPTURED = 4u, /* by a graph, of memory from outside its capture */
};

struct use {
  use_t *next;
  stream_t *stream;
  record_t *record;      /* NULL: none could be or was recorded; holds the block */
  uint64_t stamp;        /* of a held use of a free block: the stream's events with
                       this number or a higher one cover it; 0: none does     */
  capture_point_t point; /* of a use inside a capture, which has no record */
  unsigned flags;
};

/* Adds a use, or replaces the block's use on that stream by this later one
 * (rule 5). Takes over the caller's reference to `record`, which is NULL for a
 * use whose event is recorded at the free (USE_AT_FREE), or could not be
 * recorded. `spare` is used for the new use if one is needed and then set to
 * NULL. False: one is needed and there is none; nothing has happened. */
bool use_attach(block_t *block, stream_t *stream, record_t *record, unsigned flags, use_t **spare);

/* The same for the commonest mark of all: the block has a use with a record on
 * the stream of this later one. The record it had, with its reference; NULL: it
 * is not as simple as that, and nothing has happened. */
record_t *use_replace(block_t *block, record_t *record, unsigned flags);

/* The same for a use inside a capture, whose reference to the point it takes. A
 * block has at most one use for each stream outside captures, and one for each
 * branch of a capture. */
void use_attach_point(block_t *block, capture_point_t point, unsigned flags, use_t **spare);
/* A use that ends with the free gets its point, whose reference it takes; then
 * several may be of one branch, until they are united. */
void use_set_point(use_t *use, capture_point_t point);
void uses_unite_points(device_t *device, block_t *block);

/* Gives a use its record, which takes the caller's reference. */
void use_set_record(use_t *use, record_t *record);

/* A block that was just freed waits for a use that has no record. Like owner
 * order it has a position: an event from before the free does not cover it. */
void use_hold(use_t *use);
/* Gives a held use the record if that covers it. */
void use_cover(use_t *use, record_t *record);
/* The uses of a block that end with its free get their event, now. It is claimed,
 * so they are the caller's alone, and no lock is held. */
void uses_record_at_free(block_t *block);

use_t *use_take(device_t *device); /* NULL: no host memory */
void use_give(device_t *device, use_t *use);

/* Whether the use is over, for everybody. */
bool use_has_completed(const use_t *use);
/* Whether future work of `reader` is ordered after the use. */
bool use_is_satisfied(const use_t *use, const stream_t *reader);
/* ... after all uses of the block. */
bool uses_are_satisfied(const block_t *block, const stream_t *reader);
/* ... for everybody. */
bool uses_have_completed(const block_t *block);
/* Whether it may wait for what is not yet enqueued: then neither a stream nor the
 * host may wait for it. */
bool use_is_rendezvous(const use_t *use);
/* Whether it bars gates whatever its stream's traits, which change. */
bool use_is_barred(const use_t *use);
/* Whether a stream may be made to wait for the use. */
bool use_may_be_gated(const use_t *use, bool at_free_too);

/* A block that its home stream frees now gets its stamp. */
void owner_order_stamp(block_t *block);
/* Whether future work of `reader` is ordered after the home stream's work
 * before the free. */
bool owner_order_is_satisfied(const block_t *block, const stream_t *reader);
bool owner_order_has_completed(const block_t *block);
/* Whether the free block owes nothing to anybody: its uses and its owner order have completed. */
bool block_owes_nothing(const block_t *block);
/* Whether another stream than the home stream may be made to wait for it. */
bool owner_order_may_be_gated(const block_t *block);

/* Most blocks have none: then nothing is called. */
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

/* What only the replays of a capture that is over still owe. */
void uses_drop_captured(device_t *device, block_t *block);
/* Of a block that was freed into a capture which is over: nobody has held it yet. Another
 * device's streams did not see the replays, so that device's work is waited for. */
void uses_hold_unrecorded(device_t *device, block_t *block);
/* Of a pool that is gone, when its device was synchronised since: what no event stands
 * for is over. Not so for another device's streams, which that did not wait for. */
void uses_drop_unrecorded(device_t *device, block_t *block);
/* `into` comes to owe what both owe; `from` owes nothing any more. */
void uses_unite_all(device_t *device, block_t *into, block_t *from);
static inline void uses_unite(device_t *device, block_t *into, block_t *from)
{
  if (into->uses || from->uses)
    uses_unite_all(device, into, from);
}

bool uses_are_valid(const block_t *block);

/* The same for all that a free block owes. What it owes to work outside the
 * capture nothing inside satisfies. */
bool branch_is_after_all(const branch_t *branch, const block_t *block);
/* Whether the branch may be made to depend on what is missing for that. */
bool branch_may_be_gated(const branch_t *branch, const block_t *block, bool at_free_too);

#endif
