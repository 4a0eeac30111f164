#include "arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_PIECES = 256, LINE = 64 };

void *host_take(size_t size)
{
  size = (size + LINE - 1) & ~(size_t)(LINE - 1);
  void *memory = aligned_alloc(LINE, size);
  return memory ? memset(memory, 0, size) : NULL;
}

void arena_init(arena_t *arena, size_t piece)
{
  *arena = (arena_t){.piece = (piece + sizeof(void *) - 1) & ~(sizeof(void *) - 1)};
}

void arena_destroy(arena_t *arena)
{
  while (arena->chunks) {
    void *chunk = arena->chunks;
    arena->chunks = *(void **)chunk;
    free(chunk);
  }
  arena_init(arena, arena->piece);
}

static bool arena_grow(arena_t *arena)
{
  /* The first word links the chunks; the pieces begin behind it. */
  size_t bytes = LINE + CHUNK_PIECES * arena->piece;
  char *chunk = malloc(bytes);
  if (!chunk)
    return false;
  *(void **)chunk = arena->chunks;
  arena->chunks = chunk;
  arena->bytes += bytes;
  char *first = chunk + LINE - (uintptr_t)chunk % LINE;
  for (int i = CHUNK_PIECES - 1; i >= 0; i--) {
    void *piece = first + (size_t)i * arena->piece;
    *(void **)piece = arena->free;
    arena->free = piece;
  }
  return true;
}

void *arena_take(arena_t *arena)
{
  if (!arena->free && !arena_grow(arena))
    return NULL;
  void *piece = arena->free;
  arena->free = *(void **)piece;
  arena->live++;
  return piece;
}

bool arena_reserve(arena_t *arena, size_t pieces)
{
  size_t chunk = LINE + CHUNK_PIECES * arena->piece;
  while (arena->bytes / chunk * CHUNK_PIECES - arena->live < pieces)
    if (!arena_grow(arena))
      return false;
  return true;
}

void arena_give(arena_t *arena, void *piece)
{
  *(void **)piece = arena->free;
  arena->free = piece;
  arena->live--;
}

bool arena_is_valid(const arena_t *arena)
{
  size_t chunks = 0, free_pieces = 0;
  for (void *c = arena->chunks; c; c = *(void **)c)
    chunks++;
  for (void *p = arena->free; p; p = *(void **)p)
    free_pieces++;
  return arena->live + free_pieces == chunks * CHUNK_PIECES;
}
