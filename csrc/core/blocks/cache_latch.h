/* cache_latch.h: who may work in a block cache.
 *
 * The latch of a cache is open, held or closed. malloc and free hold it for about ten nanoseconds.
 * A thread with the device's lock may hold it, which pauses the cache, or close it. No thread holds
 * another lock than the device's while it waits for the latch. */
#ifndef ESPER_CACHE_LATCH_H
#define ESPER_CACHE_LATCH_H

#include "../base/core_assert.h"
#include "heap.h"

enum { LATCH_OPEN, LATCH_HELD, LATCH_CLOSED };

static inline bool cache_latch_change(block_cache_t *cache, int from, int to)
{
  return atomic_compare_exchange_strong_explicit(&cache->latch, &from, to, memory_order_acquire,
                                                 memory_order_relaxed);
}

bool cache_enter_slowly(block_cache_t *cache, int to);

/* Waits until the latch is open, then holds or closes it. False: it is closed. */
static inline bool cache_enter(block_cache_t *cache, int to)
{
  lock_order_check(LOCK_CACHE);
  return __builtin_expect(cache_latch_change(cache, LATCH_OPEN, to), 1) ||
         cache_enter_slowly(cache, to);
}

/* The caller's latch becomes open or closed, or stays held. */
static inline void cache_leave(block_cache_t *cache, int to)
{
  atomic_store_explicit(&cache->latch, to, memory_order_release);
}

/* ---- under the device's lock ---------------------------------------------- */

static inline bool cache_is_closed(const block_cache_t *cache)
{
  return cache->state == CACHE_CLOSED;
}

/* No thread works in the cache until it resumes; it keeps its blocks. Pauses may nest. The latch
 * of an open cache may be closed, by a malloc that missed and is on its way to the device's lock:
 * then no thread works in the cache either. */
static inline void cache_pause(block_cache_t *cache)
{
  if (!cache->pauses++ && cache->state == CACHE_OPEN)
    cache_enter(cache, LATCH_HELD);
}

static inline void cache_resume(block_cache_t *cache)
{
  core_assert(cache->pauses);
  if (!--cache->pauses && cache->state == CACHE_OPEN)
    cache_leave(cache, LATCH_OPEN);
}

/* Pause or resume all caches of the device. */
void caches_pause(const device_t *device);
void caches_resume(const device_t *device);

/* Whether no thread can be at work in the cache. */
static inline bool cache_is_quiet(const block_cache_t *cache)
{
  return cache->state != CACHE_OPEN || cache->pauses;
}

/* Changes the state, and the latch with it. The caller empties a cache that it closes. A malloc
 * that missed has closed the latch already. */
static inline void cache_set_state(block_cache_t *cache, cache_state state)
{
  if (!cache_is_quiet(cache) &&
      atomic_load_explicit(&cache->latch, memory_order_acquire) != LATCH_CLOSED)
    cache_enter(cache, LATCH_CLOSED);
  cache->state = (uint8_t)state;
  cache_leave(cache, state != CACHE_OPEN ? LATCH_CLOSED : cache->pauses ? LATCH_HELD : LATCH_OPEN);
}

#endif
