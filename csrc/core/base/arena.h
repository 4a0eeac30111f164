/* arena.h: fixed-size pieces of host memory for metadata. Pieces come from slabs and go back to a
 * free list, so the steady state allocates nothing. A stale pointer still points at a piece of the
 * same type: a free piece has only its first word overwritten. Pieces whose size is a multiple of a
 * cache line begin one. Not thread-safe. */
#ifndef ESPER_ARENA_H
#define ESPER_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct arena_slab arena_slab_t;

typedef struct arena {
  size_t piece; /* bytes, a multiple of the pointer size */
  void *free;   /* list through the first word */
  char *fresh;  /* the untouched pieces of the newest slab */
  size_t fresh_count;
  size_t pieces; /* of all slabs */
  size_t live;   /* pieces handed out */
  size_t bytes;  /* of all slabs */
  arena_slab_t *slabs;
} arena_t;

void arena_init(arena_t *arena, size_t piece);
void arena_destroy(arena_t *arena);
/* NULL: no host memory. The content is undefined. */
void *arena_take(arena_t *arena);
/* Makes sure that the next `pieces` takes cannot fail. False: no host memory. */
bool arena_reserve(arena_t *arena, size_t pieces);
void arena_give(arena_t *arena, void *piece);
/* Bytes of all pieces but the fresh ones, which have no memory behind them yet. */
size_t arena_used_bytes(const arena_t *arena);
bool arena_is_valid(const arena_t *arena);

/* Zeroed host memory, aligned to a cache line, given back by free(). NULL: none. */
void *host_take(size_t size);

/* Zeroed host memory that takes room only where it is written, given back by host_unmap(). NULL:
 * none. */
void *host_map(size_t size);
void host_unmap(void *memory, size_t size);

#endif
