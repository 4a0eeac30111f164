/* malloc_gate.h: the steps of malloc in which the GPU waits. A pending block, or a run of
 * neighbours, is claimed; the request's stream is gated on what it owes; then the block is handed
 * out, or put back if the driver refused a gate. */
#ifndef ESPER_MALLOC_GATE_H
#define ESPER_MALLOC_GATE_H

#include "request.h"

/* ---- in two steps ------------------------------------------------------------ */

/* Step 3: claims a block or run of the request's own heap that its stream may be gated on early.
 * Empty: there is none, or reuse order `auto` finds the wait too long. Under the device's lock. */
run_t malloc_claim_gateable(const request_t *q);
/* Gates the request's stream on the claimed run, and hands it out. NULL: a gate was refused.
 * Without the lock. */
block_t *malloc_gate_claimed(const request_t *q, run_t run);

/* ---- in one step, without the lock; NULL: no memory that may be gated on ------ */

/* Step 7: a block of the request's own heap, however long the wait. Uses by record_stream are gated
 * on, too. */
block_t *malloc_gate_own(const request_t *q);
/* Step 7: a block of another heap of its pool. */
block_t *malloc_gate_other(const request_t *q);

/* ---- gates ------------------------------------------------------------------- */

/* The gates of one malloc, which are counted and logged together. */
enum { LOGGED_GATES = 8 };

typedef struct gating {
  uint64_t issued, skipped;
  struct {
    record_t *record;  /* a use or the caller has a reference */
    size_t size;       /* of the block */
  } log[LOGGED_GATES]; /* the first gates that were issued */
} gating_t;

/* Makes the request's stream wait for everything that the blocks of a claimed run owe. False: a
 * gate was refused. Without the lock. */
bool malloc_gate_run(const request_t *q, run_t run, gating_t *gating);
/* Counts and logs the gates. To be called before the uses are dropped, under the lock. */
void malloc_note_gating(const request_t *q, const gating_t *gating);

#endif
