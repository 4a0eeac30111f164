#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#include "arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CHUNK_PIECES = 128, LINE = 64, HUGE_PAGE = 2 << 20 };

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

/* Of whole huge pages once that adds an eighth at most; NULL: not so, or no memory. */
static void *take_huge(const arena_t *arena)
{
  if (arena->bytes < 8 * HUGE_PAGE)
    return NULL;
  void *chunk = aligned_alloc(HUGE_PAGE, HUGE_PAGE);
#ifdef MADV_HUGEPAGE
  if (chunk)
    madvise(chunk, HUGE_PAGE, MADV_HUGEPAGE); /* or it stays as it is */
#endif
  return chunk;
}

static void spare_fresh(arena_t *arena)
{
  for (; arena->fresh_count; arena->fresh_count--, arena->fresh += arena->piece) {
    *(void **)arena->fresh = arena->free;
    arena->free = arena->fresh;
  }
}

/* The first word of a chunk links it. Behind that, after so many bytes at most, the pieces
 * begin: where a line does if they are whole lines. */
static size_t most_before_pieces(const arena_t *arena)
{
  return arena->piece % LINE ? sizeof(max_align_t) : LINE;
}

static bool arena_grow(arena_t *arena)
{
  size_t bytes = HUGE_PAGE, before = most_before_pieces(arena);
  char *chunk = take_huge(arena);
  if (!chunk) {
    bytes = before + CHUNK_PIECES * arena->piece;
    chunk = malloc(bytes);
  }
  if (!chunk)
    return false;
  spare_fresh(arena);
  *(void **)chunk = arena->chunks;
  arena->chunks = chunk;
  arena->bytes += bytes;
  arena->fresh = chunk + before - (uintptr_t)chunk % before;
  arena->fresh_count = (bytes - before) / arena->piece;
  arena->pieces += arena->fresh_count;
  return true;
}

static void *take_fresh(arena_t *arena)
{
  if (!arena->fresh_count && !arena_grow(arena))
    return NULL;
  void *piece = arena->fresh;
  arena->fresh += arena->piece;
  arena->fresh_count--;
  arena->live++;
  return piece;
}

void *arena_take(arena_t *arena)
{
  void *piece = arena->free;
  if (!piece)
    return take_fresh(arena);
  arena->free = *(void **)piece;
  arena->live++;
  return piece;
}

bool arena_reserve(arena_t *arena, size_t pieces)
{
  while (arena->pieces - arena->live < pieces)
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
  size_t free_pieces = 0;
  for (void *p = arena->free; p; p = *(void **)p)
    free_pieces++;
  return arena->live + free_pieces + arena->fresh_count == arena->pieces;
}
