/* hold_back.h: before memory grows, the host waits for pending memory.
 *
 * A host that runs ahead of the GPU frees memory long before other streams are done with it, and
 * takes new memory meanwhile. So when a heap's awaited memory and the request exceed an allowance,
 * malloc waits on the host for the oldest work that this memory waits for. The GPU must stay busy
 * meanwhile. So as long as memory can grow, the blocks that became pending last are not waited for:
 * two, and a large one behind smaller ones. The allowance is doubled when a wait left both streams
 * idle and nothing pending.
 *
 * Nobody is held back inside a capture, or in a callback of the embedder's. host_wait.h
 * says when a wait ends in vain. */
#ifndef ESPER_HOLD_BACK_H
#define ESPER_HOLD_BACK_H

#include "request.h"

/* Waits for one record, if more than the allowance is pending. False: it did not wait, or in vain,
 * so that memory should grow. No lock is held. */
bool hold_back(const request_t *q);

/* The same whatever the allowance. False: there is nothing to wait for, or the wait failed. */
bool wait_for_oldest(const request_t *q);

/* How often a request waits at most: other threads may add pending memory for ever. */
unsigned most_waits(const request_t *q);

/* drain_device, while the embedder's locks (Python's, for one) are released. */
esper_status drain_without_embedder(const request_t *q, unsigned how);
/* Waits, the same way, until a sleep in another thread has sent its pages. */
void wait_for_sleep_without_embedder(const request_t *q);

/* Bytes that may be pending in a heap, before they are raised. SIZE_MAX: there is no limit. */
size_t allowance_given(core_t *core);
/* The same as raised for this heap. Under the device's lock. */
size_t allowance_of(const heap_t *heap);

/* Lets the embedder's callbacks free memory. False: they freed none. */
bool call_free_memory(const request_t *q, bool short_of_memory);

#endif
