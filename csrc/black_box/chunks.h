/* chunks.h: where threads write their events. */
#ifndef ESPER_BLACK_BOX_CHUNKS_H
#define ESPER_BLACK_BOX_CHUNKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "format.h"

enum { CHUNK_WORDS = 8183 }; /* 64 KiB with what is before them */

typedef struct chunk {
  struct chunk *next;
  struct chunk *prev; /* of the chunks that threads write to */
  uint64_t ticks;     /* at its beginning */
  uint64_t from;      /* what the next event counts its ticks from; the owner's alone */
  uint64_t until;     /* when its thread left it; UINT64_MAX: it has not */
  const void *stream; /* of the last malloc or mark, its device and lane; the owner's alone */
  int device;
  unsigned lane;
  uint32_t thread;
  atomic_uint words; /* rises when an event is complete */
  uint64_t word[CHUNK_WORDS];
} chunk_t;

/* The calling thread's. A few bytes, for which every process has room. */
extern __attribute__((tls_model("initial-exec"))) _Thread_local chunk_t *own_chunk;

/* A clock that all threads share. */
static inline uint64_t clock_ticks(void)
{
#if defined(__x86_64__)
  return __rdtsc() >> TICK_SHIFT;
#else
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec) >> TICK_SHIFT;
#endif
}

/* A chunk that has room for three words, and counts from at most 2^20 ticks ago. NULL: there is no
 * host memory. Takes the box's lock if it must be another one. */
chunk_t *chunk_with_room(uint64_t now);

static inline chunk_t *chunk_for(uint64_t now)
{
  chunk_t *chunk = own_chunk;
  if (__builtin_expect(chunk != NULL, 1) &&
      atomic_load_explicit(&chunk->words, memory_order_relaxed) + 2 <= CHUNK_WORDS &&
      !((now - chunk->from) >> TICK_BITS))
    return chunk;
  return chunk_with_room(now);
}

/* Adds an event of one or two words; `second` is ignored for one. */
static inline void chunk_add(chunk_t *chunk, uint64_t first, uint64_t second)
{
  unsigned at = atomic_load_explicit(&chunk->words, memory_order_relaxed);
  chunk->word[at] = first;
  unsigned words = (unsigned)box_words(box_kind(first));
  if (words == 2)
    chunk->word[at + 1] = second;
  atomic_store_explicit(&chunk->words, at + words, memory_order_release);
}

/* The most bytes of all chunks. */
void chunks_limit(size_t bytes);

/* Of all chunks, oldest first, with the lock held: those in the queue, then those of threads. */
chunk_t *chunks_queued(void);
chunk_t *chunks_open(void);

/* When the first of all began. */
uint64_t chunks_oldest_ticks(void);

/* How many chunks there are, and how often one was used again. */
size_t chunks_count(void);
uint64_t chunks_used_again(void);
bool chunks_are_valid(void);
/* In a forked child: there is none. */
void chunks_leave_to_parent(void);
/* Frees all, but for the chunk that the calling thread has. No other thread records. For tests. */
void chunks_forget(void);

#endif
