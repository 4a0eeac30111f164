#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#include "arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A slab is an eighth of the arena, so that a large one asks malloc rarely. */
enum { FIRST_SLAB = 64 << 10, LARGEST_SLAB = 2 << 20, SLAB_SHARE = 8, LINE = 64 };

/* ---- host memory ----------------------------------------------------------- */

static size_t round_up(size_t size, size_t to)
{
  return (size + to - 1) / to * to;
}

void *host_take(size_t size)
{
  void *memory = aligned_alloc(LINE, round_up(size, LINE));
  return memory ? memset(memory, 0, size) : NULL;
}

/* Not calloc: where it reuses memory, it writes zeros to all of it. */
void *host_map(size_t size)
{
  void *memory =
      mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    return NULL;
  madvise(memory, size, MADV_NOHUGEPAGE); /* a huge page would take more than what is written */
  return memory;
}

void host_unmap(void *memory, size_t size)
{
  munmap(memory, size);
}

/* ---- slabs ----------------------------------------------------------------- */

/* The pieces come after it. */
struct arena_slab {
  _Alignas(LINE) arena_slab_t *next;
  size_t pieces;
};

void arena_init(arena_t *arena, size_t piece)
{
  *arena = (arena_t){.piece = round_up(piece, sizeof(void *))};
}

void arena_destroy(arena_t *arena)
{
  for (arena_slab_t *slab = arena->slabs, *next; slab; slab = next) {
    next = slab->next;
    free(slab);
  }
  arena_init(arena, arena->piece);
}

static void free_fresh(arena_t *arena)
{
  for (; arena->fresh_count; arena->fresh_count--, arena->fresh += arena->piece) {
    *(void **)arena->fresh = arena->free;
    arena->free = arena->fresh;
  }
}

static bool arena_grow(arena_t *arena)
{
  size_t size = round_up(arena->bytes / SLAB_SHARE + 1, FIRST_SLAB);
  size = size > LARGEST_SLAB ? LARGEST_SLAB : size;
  arena_slab_t *slab = aligned_alloc(LINE, size);
  if (!slab)
    return false;
  free_fresh(arena);
  slab->next = arena->slabs;
  slab->pieces = (size - sizeof *slab) / arena->piece;
  arena->slabs = slab;
  arena->fresh = (char *)(slab + 1);
  arena->fresh_count = slab->pieces;
  arena->pieces += slab->pieces;
  arena->bytes += size;
  return true;
}

/* ---- pieces ---------------------------------------------------------------- */

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

/* ---- checking -------------------------------------------------------------- */

size_t arena_used_bytes(const arena_t *arena)
{
  return arena->bytes - arena->fresh_count * arena->piece;
}

bool arena_is_valid(const arena_t *arena)
{
  size_t free_pieces = 0, pieces = 0;
  for (void *p = arena->free; p; p = *(void **)p)
    free_pieces++;
  for (const arena_slab_t *slab = arena->slabs; slab; slab = slab->next)
    pieces += slab->pieces;
  return arena->pieces == pieces && arena->live + free_pieces + arena->fresh_count == pieces;
}
