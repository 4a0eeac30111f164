/* arena.h: fixed-size pieces of host memory for metadata. Pieces come from chunks and go back to a
 * free list, so the steady state allocates nothing. A stale pointer still points at a piece of the
 * same type: a free piece has only its first word overwritten. Pieces whose size is a multiple of a
 * cache line begin one. A large arena grows by huge pages, which saves TLB misses. arena_trim gives
 * chunks without live pieces back to the system; their addresses stay, and mostly read as zeros.
 * Not thread-safe. */
#ifndef ESPER_ARENA_H
#define ESPER_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct arena_chunk arena_chunk_t;

typedef struct arena {
  size_t piece; /* bytes, a multiple of the pointer size */
  void *free;   /* list through the first word */
  char *fresh;  /* the untouched pieces of the newest chunk */
  size_t fresh_count;
  size_t pieces;                    /* of `chunks` */
  size_t live;                      /* pieces handed out */
  size_t given;                     /* pieces that came back since arena_trim last looked */
  size_t live_then;                 /* `live` at that time */
  size_t bytes;                     /* of `chunks` */
  arena_chunk_t *chunks, *returned; /* the memory of `returned` went back to the system */
  arena_chunk_t *slabs;             /* the first chunk of each allocation */
  char *unopened;                   /* the newest slab's chunks that were not used yet */
  size_t unopened_count;
} arena_t;

void arena_init(arena_t *arena, size_t piece);
void arena_destroy(arena_t *arena);
/* NULL: no host memory. The content is undefined. */
void *arena_take(arena_t *arena);
/* Makes sure that the next `pieces` takes cannot fail. False: no host memory. */
bool arena_reserve(arena_t *arena, size_t pieces);
void arena_give(arena_t *arena, void *piece);
/* Returns chunks without live pieces to the system, if enough has become free since the last look
 * to be worth another. */
void arena_trim(arena_t *arena);
/* Bytes of all pieces but the fresh ones, which have no memory behind them yet. */
size_t arena_used_bytes(const arena_t *arena);
bool arena_is_valid(const arena_t *arena);

/* Zeroed host memory, aligned to a cache line, given back by free(). NULL: none. */
void *host_take(size_t size);

/* Whole pages of host memory, not zeroed, given back by free(). NULL: none. */
void *host_take_pages(size_t size);
/* Gives the memory behind some of those pages back to the system; they read as zeros until they are
 * written again. False: the memory stays. */
bool host_return(void *pages, size_t size);

/* Zeroed host memory that takes room only where it is written, given back by host_unmap(). NULL:
 * none. */
void *host_map(size_t size);
void host_unmap(void *memory, size_t size);

#endif
