/* arena.h: fixed-size pieces of host memory for metadata. Pieces come from
 * chunks and go back to a free list, so the steady state allocates nothing and
 * a stale pointer still points at a piece of the same type, of which only the
 * first word is overwritten while it is free. Pieces of whole cache lines begin one.
 * A large arena grows by huge pages: what is looked up at random in many small ones
 * waits for their addresses, too. Not thread-safe. */
#ifndef ESPER_ARENA_H
#define ESPER_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct arena {
  size_t piece;  /* bytes, a multiple of the pointer size                     */
  void *free;    /* list through the first word                               */
  void *chunks;  /* list through the first word                               */
  char *fresh;   /* pieces of the last chunk that nobody ever had, ...         */
  size_t fresh_count; /* ... so many                                          */
  size_t pieces; /* of all chunks                                             */
  size_t live;   /* pieces handed out                                         */
  size_t bytes;  /* of all chunks                                             */
} arena_t;

void arena_init(arena_t *arena, size_t piece);
void arena_destroy(arena_t *arena);
/* NULL: no host memory. The content is undefined. */
void *arena_take(arena_t *arena);
/* So many pieces can be had without fail from now on. False: no host memory. */
bool arena_reserve(arena_t *arena, size_t pieces);
void arena_give(arena_t *arena, void *piece);
bool arena_is_valid(const arena_t *arena);

/* Zeroed host memory for a structure that begins a cache line, given back by
 * free(). NULL: none. */
void *host_take(size_t size);

#endif
