/* malloc_gate.h: the steps of malloc in which the GPU waits: a pending block, or a
 * run of neighbours, is claimed, the request's stream is gated on what it owes,
 * and then it is handed out, or put back if a gate was refused. NULL: no memory
 * that may be gated on. No lock is held. */
#ifndef ESPER_MALLOC_GATE_H
#define ESPER_MALLOC_GATE_H

#include "request.h"

/* Of the request's own heap; `at_free_too`, of uses that end with a free as well,
 * and however long the wait. */
block_t *malloc_gate_own(const request_t *q, bool at_free_too);
/* Makes the request's stream wait for all that the blocks of a claimed run owe; false:
 * a gate was refused. */
bool malloc_gate_run(const request_t *q, run_t run);
/* Of the other heaps of its pool. */
block_t *malloc_gate_other(const request_t *q);

#endif
