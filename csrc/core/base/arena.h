/* arena.h: fixed-size pieces of host memory for metadata. Pieces come from
 * chunks and go back to a free list, so the steady state allocates nothing and
 * a stale pointer still points at a piece of the same type, of which only the
 * first word is overwritten while it is free. Pieces of whole cache lines begin one.
 * A large arena grows by huge pages: what is looked up at random in many small ones
 * waits for their addresses, too. Chunks of which no piece is out go back to the system
 * when that is asked for; their addresses stay, and read as zeros. Not thread-safe. */
#ifndef ESPER_ARENA_H
#define ESPER_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct arena_chunk {
  char *start;
  size_t bytes;
  size_t unused; /* pieces, while arena_trim counts */
  bool returned; /* to the system: nothing is there */
} arena_chunk_t;

typedef struct arena {
  size_t piece;          /* bytes, a multiple of the pointer size */
  void *free;            /* list through the first word */
  char *fresh;           /* pieces of a chunk that nobody had since it came, ... */
  size_t fresh_count;    /* ... so many */
  size_t pieces;         /* of all chunks that are there */
  size_t live;           /* pieces handed out */
  size_t given;          /* pieces that came back since arena_trim looked at all ... */
  size_t live_then;      /* ... and so many were live */
  size_t bytes;          /* of all chunks that are there */
  arena_chunk_t *chunks; /* by address */
  size_t chunk_count, chunk_capacity, returned_count;
} arena_t;

void arena_init(arena_t *arena, size_t piece);
void arena_destroy(arena_t *arena);
/* NULL: no host memory. The content is undefined. */
void *arena_take(arena_t *arena);
/* So many pieces can be had without fail from now on. False: no host memory. */
bool arena_reserve(arena_t *arena, size_t pieces);
void arena_give(arena_t *arena, void *piece);
/* Returns chunks of which no piece is out to the system, where much is free that was not
 * looked at before. */
void arena_trim(arena_t *arena);
/* Of the pieces that somebody had: the others have no memory yet. */
size_t arena_used_bytes(const arena_t *arena);
bool arena_is_valid(const arena_t *arena);

/* Zeroed host memory for a structure that begins a cache line, given back by
 * free(). NULL: none. */
void *host_take(size_t size);

/* Whole pages of it, not zeroed, which host_return() can return. */
void *host_take_pages(size_t size);
/* Some of those go back to the system; they read as zeros until they are used
 * again. False: they stay. */
bool host_return(void *pages, size_t size);

/* Zeroed host memory of which only what is written takes any, given back by
 * host_unmap(). NULL: none. */
void *host_map(size_t size);
void host_unmap(void *memory, size_t size);

#endif
