#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#include "arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* malloc wastes a page on each slab, so slabs grow with the arena. */
enum { CHUNK = 64 << 10, SLAB_SHARE = 8, LINE = 64, HUGE_PAGE = 2 << 20 };

/* ---- host memory ----------------------------------------------------------- */

static size_t round_up(size_t size, size_t to)
{
  return (size + to - 1) & ~(to - 1);
}

static size_t page_size(void)
{
  return (size_t)sysconf(_SC_PAGESIZE);
}

void *host_take(size_t size)
{
  void *memory = aligned_alloc(LINE, round_up(size, LINE));
  return memory ? memset(memory, 0, size) : NULL;
}

void *host_take_pages(size_t size)
{
  return aligned_alloc(page_size(), round_up(size, page_size()));
}

bool host_return(void *pages, size_t size)
{
  return madvise(pages, round_up(size, page_size()), MADV_DONTNEED) == 0;
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

/* ---- chunks ---------------------------------------------------------------- */

/* Begins a chunk, whose address is a multiple of its size. The pieces come after it. */
struct arena_chunk {
  _Alignas(LINE) arena_chunk_t *next;
  arena_chunk_t *next_slab;
  size_t unused; /* pieces, while arena_trim counts */
};

static arena_chunk_t *chunk_of(const void *piece)
{
  return (arena_chunk_t *)((uintptr_t)piece & ~(uintptr_t)(CHUNK - 1));
}

static size_t pieces_of_chunk(const arena_t *arena)
{
  return (CHUNK - sizeof(arena_chunk_t)) / arena->piece;
}

void arena_init(arena_t *arena, size_t piece)
{
  *arena = (arena_t){.piece = (piece + sizeof(void *) - 1) & ~(sizeof(void *) - 1)};
}

void arena_destroy(arena_t *arena)
{
  for (arena_chunk_t *slab = arena->slabs, *next; slab; slab = next) {
    next = slab->next_slab;
    free(slab);
  }
  arena_init(arena, arena->piece);
}

/* An eighth of the arena, and at most a huge page. */
static bool take_slab(arena_t *arena)
{
  size_t share = arena->bytes / SLAB_SHARE / CHUNK * CHUNK;
  size_t size = share > HUGE_PAGE ? HUGE_PAGE : share > CHUNK ? share : CHUNK;
  arena_chunk_t *slab = aligned_alloc(size == HUGE_PAGE ? HUGE_PAGE : CHUNK, size);
  if (!slab)
    return false;
  if (size == HUGE_PAGE)
    madvise(slab, size, MADV_HUGEPAGE); /* only a hint */
  slab->next_slab = arena->slabs;
  arena->slabs = slab;
  arena->unopened = (char *)slab;
  arena->unopened_count = size / CHUNK;
  return true;
}

static arena_chunk_t *take_chunk(arena_t *arena)
{
  arena_chunk_t *chunk = arena->returned;
  if (chunk) {
    arena->returned = chunk->next;
    return chunk;
  }
  if (!arena->unopened_count && !take_slab(arena))
    return NULL;
  chunk = (arena_chunk_t *)arena->unopened;
  arena->unopened += CHUNK;
  arena->unopened_count--;
  return chunk;
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
  arena_chunk_t *chunk = take_chunk(arena);
  if (!chunk)
    return false;
  chunk->next = arena->chunks;
  arena->chunks = chunk;
  free_fresh(arena);
  arena->fresh = (char *)(chunk + 1);
  arena->fresh_count = pieces_of_chunk(arena);
  arena->pieces += arena->fresh_count;
  arena->bytes += CHUNK;
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
  arena->given++;
}

/* ---- giving back ----------------------------------------------------------- */

/* Looking at every free piece can take long, and finds nothing while live pieces lie scattered. So
 * enough must have changed since the last look: many pieces came back, or half of the live ones
 * did. */
static bool is_worth_a_look(const arena_t *arena)
{
  enum { MUCH = 4, MANY = 8 }; /* a quarter of all pieces; an eighth of the unused ones */
  size_t unused = arena->pieces - arena->live;
  return page_size() < CHUNK && unused >= arena->pieces / MUCH &&
         (arena->given >= unused / MANY || arena->live < arena->live_then / 2);
}

/* Counts each chunk's unused pieces. False: no chunk is wholly unused. */
static bool count_unused(arena_t *arena)
{
  bool any = false;
  for (arena_chunk_t *chunk = arena->chunks; chunk; chunk = chunk->next)
    chunk->unused = 0;
  if (arena->fresh_count)
    any = (chunk_of(arena->fresh)->unused = arena->fresh_count) == pieces_of_chunk(arena);
  for (void *p = arena->free; p; p = *(void **)p)
    any |= ++chunk_of(p)->unused == pieces_of_chunk(arena);
  return any;
}

/* The chunk's first page stays, because the chunk's own fields are there. No huge page may come
 * back around it. */
static void return_chunk(arena_t *arena, arena_chunk_t *chunk)
{
  madvise(chunk, CHUNK, MADV_NOHUGEPAGE);
  host_return((char *)chunk + page_size(), CHUNK - page_size());
  chunk->next = arena->returned;
  arena->returned = chunk;
  arena->pieces -= pieces_of_chunk(arena);
  arena->bytes -= CHUNK;
}

void arena_trim(arena_t *arena)
{
  if (!is_worth_a_look(arena))
    return;
  arena->given = 0;
  arena->live_then = arena->live;
  if (!count_unused(arena))
    return;
  if (arena->fresh_count && chunk_of(arena->fresh)->unused == pieces_of_chunk(arena))
    arena->fresh_count = 0;
  for (void **link = &arena->free; *link;)
    if (chunk_of(*link)->unused == pieces_of_chunk(arena))
      *link = *(void **)*link;
    else
      link = *link;
  for (arena_chunk_t **link = &arena->chunks, *chunk; (chunk = *link);)
    if (chunk->unused == pieces_of_chunk(arena)) {
      *link = chunk->next;
      return_chunk(arena, chunk);
    } else {
      link = &chunk->next;
    }
}

/* ---- checking -------------------------------------------------------------- */

size_t arena_used_bytes(const arena_t *arena)
{
  return arena->bytes - arena->fresh_count * arena->piece;
}

bool arena_is_valid(const arena_t *arena)
{
  size_t free_pieces = 0, chunks = 0;
  for (void *p = arena->free; p; p = *(void **)p)
    free_pieces++;
  for (const arena_chunk_t *chunk = arena->chunks; chunk; chunk = chunk->next)
    chunks++;
  return arena->pieces == chunks * pieces_of_chunk(arena) && arena->bytes == chunks * CHUNK &&
         arena->live + free_pieces + arena->fresh_count == arena->pieces;
}
