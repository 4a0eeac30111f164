/* malloc_deterministic.h: malloc from private pools, outside captures, with reuse order `gate`.
 *
 * Addresses there repeat from run to run. Which memory serves depends on the mallocs, frees and
 * marks of the heap's stream, and not on what has completed meanwhile. So a ready block is not
 * preferred to a pending one, and memory that other streams freed serves only when memory cannot
 * grow. Neighbouring free blocks count as one range: ready ones, and pending ones that the stream
 * may be gated on. The request gets the beginning of the best-fitting range, and waits for what
 * these bytes owe. docs/design.md says when addresses do not repeat. */
#ifndef ESPER_MALLOC_DETERMINISTIC_H
#define ESPER_MALLOC_DETERMINISTIC_H

#include "request.h"

/* The best fit of the request's own heap. NULL: there is none, or a gate was refused. No lock is
 * held. */
block_t *malloc_take_deterministic(const request_t *q);

#endif
