/* malloc_deterministic.h: malloc from private pools, outside captures, with reuse order `gate`.
 *
 * Addresses there repeat from run to run. Which memory serves depends on the mallocs, frees and
 * marks of the heap's stream, and on nothing that has completed meanwhile: a ready block does not
 * go before a pending one, and what other streams freed is taken only when memory cannot grow.
 * Neighbouring free blocks count as one, ready ones and those that the stream may be gated on; the
 * request gets the beginning of what fits best, and waits for what these bytes owe. docs/design.md
 * says what does not repeat. */
#ifndef ESPER_MALLOC_DETERMINISTIC_H
#define ESPER_MALLOC_DETERMINISTIC_H

#include "request.h"

/* The best fit of the request's own heap. NULL: there is none, or a gate was refused. No lock is
 * held. */
block_t *malloc_take_deterministic(const request_t *q);

#endif
