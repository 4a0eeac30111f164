/* source.h: where a pool's segments come from and go back to: the driver, or an allocator that the
 * program gave the pool. Pages always come from the driver, and go back by mapped_unmap. Called
 * without a lock. */
#ifndef ESPER_SOURCE_H
#define ESPER_SOURCE_H

#include "pool.h"

/* How many callbacks the thread is in, of a source or others: its mallocs are not held back. */
extern _Thread_local unsigned embedder_callbacks;

/* ESPER_OUT_OF_MEMORY: the source has no more. */
esper_status source_obtain(const pool_t *pool, size_t size, uintptr_t *address);

/* Gives memory back that owes nothing any more. An error is the driver's. */
esper_status source_give_back(const pool_t *pool, uintptr_t address, size_t size);

/* The pool needs its source no more. */
void source_drop(pool_t *pool);

#endif
