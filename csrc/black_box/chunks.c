#include "chunks.h"

#include <pthread.h>
#include <stdlib.h>

#include "carried.h"
#include "lock.h"

__attribute__((tls_model("initial-exec"))) _Thread_local chunk_t *own_chunk;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t at_thread_exit;
static chunk_t *oldest, *newest; /* the queue of full chunks */
static chunk_t *open_chunks;
static size_t count, most = 1;
static uint64_t used_again;
static uint32_t threads;
static _Thread_local uint32_t own_number;

/* With the lock held. */
static void close_chunk(chunk_t *chunk)
{
  *(chunk->prev ? &chunk->prev->next : &open_chunks) = chunk->next;
  if (chunk->next)
    chunk->next->prev = chunk->prev;
  chunk->next = chunk->prev = NULL;
  chunk->until = clock_ticks();
  *(newest ? &newest->next : &oldest) = chunk;
  newest = chunk;
}

static void thread_ends(void *chunk)
{
  box_lock();
  own_chunk = NULL;
  close_chunk(chunk);
  box_unlock();
}

void chunks_leave_to_parent(void)
{
  box_lock_anew();
  own_chunk = NULL;
  oldest = newest = open_chunks = NULL;
  count = 0;
}

static void make_key(void)
{
  (void)pthread_key_create(&at_thread_exit, thread_ends);
}

uint64_t chunks_oldest_ticks(void)
{
  uint64_t ticks = UINT64_MAX;
  for (const chunk_t *chunk = oldest; chunk; chunk = chunk->next)
    ticks = chunk->ticks < ticks ? chunk->ticks : ticks;
  for (const chunk_t *chunk = open_chunks; chunk; chunk = chunk->next)
    ticks = chunk->ticks < ticks ? chunk->ticks : ticks;
  return ticks;
}

/* A time before which no chunk began. To look at all of them each time would take longer than all
 * else that is done for a chunk, and an earlier answer holds as well. */
static uint64_t none_began_before(void)
{
  static uint64_t ticks;
  enum { OFTEN = 64 };
  if (used_again % OFTEN == 1)
    ticks = chunks_oldest_ticks();
  return ticks;
}

/* A chunk that nobody writes to. With the lock held. */
static chunk_t *take_chunk(void)
{
  chunk_t *chunk = count < most || !oldest ? malloc(sizeof *chunk) : NULL;
  if (chunk) {
    count++;
    return chunk;
  }
  chunk = oldest;
  if (!chunk)
    return NULL;
  oldest = chunk->next;
  if (!oldest)
    newest = NULL;
  used_again++;
  carry(chunk, none_began_before());
  return chunk;
}

static chunk_t *open_chunk(uint64_t now)
{
  pthread_once(&once, make_key);
  box_lock();
  if (own_chunk)
    close_chunk(own_chunk);
  chunk_t *chunk = take_chunk();
  if (chunk) {
    own_number = own_number ? own_number : ++threads;
    chunk->ticks = chunk->from = now;
    chunk->until = UINT64_MAX;
    chunk->thread = own_number;
    chunk->device = -1; /* its lane is not known */
    atomic_store_explicit(&chunk->words, 0, memory_order_relaxed);
    chunk->prev = NULL;
    chunk->next = open_chunks;
    if (open_chunks)
      open_chunks->prev = chunk;
    open_chunks = chunk;
  }
  own_chunk = chunk;
  box_unlock();
  pthread_setspecific(at_thread_exit, chunk);
  return chunk;
}

chunk_t *chunk_with_room(uint64_t now)
{
  chunk_t *chunk = own_chunk;
  if (!chunk || atomic_load_explicit(&chunk->words, memory_order_relaxed) + 3 > CHUNK_WORDS)
    return open_chunk(now);
  if ((now - chunk->from) >> TICK_BITS) {
    chunk_add(chunk, BOX_TIME | now << 4, 0);
    chunk->from = now;
  }
  return chunk;
}

void chunks_limit(size_t bytes)
{
  box_lock();
  most = bytes / sizeof(chunk_t) ? bytes / sizeof(chunk_t) : 1;
  box_unlock();
}

chunk_t *chunks_queued(void)
{
  return oldest;
}

chunk_t *chunks_open(void)
{
  return open_chunks;
}

size_t chunks_count(void)
{
  return count;
}

uint64_t chunks_used_again(void)
{
  return used_again;
}

void chunks_forget(void)
{
  for (chunk_t *next; oldest; oldest = next, count--) {
    next = oldest->next;
    free(oldest);
  }
  newest = NULL;
  used_again = 0;
  if (own_chunk)
    atomic_store_explicit(&own_chunk->words, 0, memory_order_relaxed);
}

static bool chunk_is_valid(const chunk_t *chunk)
{
  unsigned at = 0, words = atomic_load_explicit(&chunk->words, memory_order_acquire);
  while (at < words) {
    unsigned kind = box_kind(chunk->word[at]);
    if (kind == BOX_NONE || kind >= BOX_KINDS)
      return false;
    at += (unsigned)box_words(kind);
  }
  return at == words && words <= CHUNK_WORDS && chunk->thread && chunk->thread <= threads;
}

bool chunks_are_valid(void)
{
  size_t found = 0;
  bool valid = !oldest == !newest && (!newest || !newest->next);
  const chunk_t *before = NULL;
  for (const chunk_t *chunk = oldest; chunk; chunk = chunk->next, found++)
    valid &= chunk_is_valid(chunk);
  for (const chunk_t *chunk = open_chunks; chunk; before = chunk, chunk = chunk->next, found++)
    valid &= chunk_is_valid(chunk) && chunk->prev == before;
  return valid && found == count;
}
