#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#include "arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Untouched pages of a chunk take no memory yet, but malloc wastes one page on each chunk. */
enum { LEAST_CHUNK = 64 << 10, CHUNK_SHARE = 8, LINE = 64, HUGE_PAGE = 2 << 20 };

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

void arena_init(arena_t *arena, size_t piece)
{
  *arena = (arena_t){.piece = (piece + sizeof(void *) - 1) & ~(sizeof(void *) - 1)};
}

void arena_destroy(arena_t *arena)
{
  for (size_t i = 0; i < arena->chunk_count; i++)
    free(arena->chunks[i].start);
  free(arena->chunks);
  arena_init(arena, arena->piece);
}

/* How many chunks begin at or before `address`. */
static size_t chunks_up_to(const arena_t *arena, const void *address)
{
  size_t low = 0, high = arena->chunk_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (arena->chunks[middle].start <= (const char *)address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static arena_chunk_t *chunk_of(const arena_t *arena, const void *piece)
{
  return &arena->chunks[chunks_up_to(arena, piece) - 1];
}

static size_t pieces_of(const arena_t *arena, const arena_chunk_t *chunk)
{
  return chunk->bytes / arena->piece;
}

/* A chunk of one huge page, once that adds at most an eighth. NULL: too early, or no memory. */
static char *take_huge(const arena_t *arena)
{
  if (arena->bytes < 8 * HUGE_PAGE)
    return NULL;
  char *chunk = aligned_alloc(HUGE_PAGE, HUGE_PAGE);
#ifdef MADV_HUGEPAGE
  if (chunk)
    madvise(chunk, HUGE_PAGE, MADV_HUGEPAGE); /* only a hint */
#endif
  return chunk;
}

static void add_free(arena_t *arena, char *pieces, size_t count)
{
  for (; count; count--, pieces += arena->piece) {
    *(void **)pieces = arena->free;
    arena->free = pieces;
  }
}

/* Makes the chunk's pieces the fresh ones. */
static void begin_chunk(arena_t *arena, const arena_chunk_t *chunk)
{
  add_free(arena, arena->fresh, arena->fresh_count);
  arena->fresh = chunk->start;
  arena->fresh_count = pieces_of(arena, chunk);
  arena->pieces += arena->fresh_count;
  arena->bytes += chunk->bytes;
}

static bool make_room_for_chunk(arena_t *arena)
{
  if (arena->chunk_count < arena->chunk_capacity)
    return true;
  size_t capacity = arena->chunk_capacity ? 2 * arena->chunk_capacity : 4;
  arena_chunk_t *chunks = realloc(arena->chunks, capacity * sizeof *chunks);
  if (!chunks)
    return false;
  arena->chunks = chunks;
  arena->chunk_capacity = capacity;
  return true;
}

/* Uses a chunk again that was returned to the system. */
static void take_back(arena_t *arena)
{
  arena_chunk_t *chunk = arena->chunks;
  while (!chunk->returned)
    chunk++;
  chunk->returned = false;
  arena->returned_count--;
  begin_chunk(arena, chunk);
}

static bool arena_grow(arena_t *arena)
{
  if (arena->returned_count) {
    take_back(arena);
    return true;
  }
  if (!make_room_for_chunk(arena))
    return false;
  arena_chunk_t chunk = {.start = take_huge(arena), .bytes = HUGE_PAGE};
  if (!chunk.start) {
    size_t page = page_size(), share = arena->bytes / CHUNK_SHARE;
    chunk.bytes = round_up(share > LEAST_CHUNK ? share : LEAST_CHUNK, page);
    chunk.start = aligned_alloc(page, chunk.bytes);
  }
  if (!chunk.start)
    return false;
  arena_chunk_t *at = &arena->chunks[chunks_up_to(arena, chunk.start)];
  memmove(at + 1, at, (size_t)(&arena->chunks[arena->chunk_count++] - at) * sizeof *at);
  *at = chunk;
  begin_chunk(arena, at);
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
  return unused >= arena->pieces / MUCH &&
         (arena->given >= unused / MANY || arena->live < arena->live_then / 2);
}

static bool is_unused(const arena_t *arena, const arena_chunk_t *chunk)
{
  return !chunk->returned && chunk->unused == pieces_of(arena, chunk);
}

/* Counts each chunk's unused pieces. False: no chunk is wholly unused. */
static bool count_unused(const arena_t *arena)
{
  bool any = false;
  for (size_t i = 0; i < arena->chunk_count; i++)
    arena->chunks[i].unused = 0;
  for (void *p = arena->free; p; p = *(void **)p)
    chunk_of(arena, p)->unused++;
  if (arena->fresh_count)
    chunk_of(arena, arena->fresh)->unused += arena->fresh_count;
  for (size_t i = 0; i < arena->chunk_count && !any; i++)
    any = is_unused(arena, &arena->chunks[i]);
  return any;
}

/* Takes the pieces of unused chunks out of the free list and the fresh ones. */
static void forget_unused(arena_t *arena)
{
  void **link = &arena->free;
  while (*link)
    if (is_unused(arena, chunk_of(arena, *link)))
      *link = *(void **)*link;
    else
      link = *link;
  if (arena->fresh_count && is_unused(arena, chunk_of(arena, arena->fresh)))
    arena->fresh_count = 0;
}

static void return_chunk(arena_t *arena, arena_chunk_t *chunk)
{
  size_t pieces = pieces_of(arena, chunk);
  if (!host_return(chunk->start, chunk->bytes)) { /* for example, pages locked into memory */
    add_free(arena, chunk->start, pieces);
    return;
  }
  chunk->returned = true;
  arena->returned_count++;
  arena->pieces -= pieces;
  arena->bytes -= chunk->bytes;
}

void arena_trim(arena_t *arena)
{
  if (!is_worth_a_look(arena))
    return;
  arena->given = 0;
  arena->live_then = arena->live;
  if (!count_unused(arena))
    return;
  forget_unused(arena);
  for (size_t i = 0; i < arena->chunk_count; i++)
    if (is_unused(arena, &arena->chunks[i]))
      return_chunk(arena, &arena->chunks[i]);
}

/* ---- checking -------------------------------------------------------------- */

size_t arena_used_bytes(const arena_t *arena)
{
  return arena->bytes - arena->fresh_count * arena->piece;
}

bool arena_is_valid(const arena_t *arena)
{
  size_t free_pieces = 0, pieces = 0, bytes = 0, returned = 0;
  bool valid = true;
  for (size_t i = 0; i < arena->chunk_count; i++) {
    const arena_chunk_t *chunk = &arena->chunks[i];
    valid &= !i || chunk[-1].start + chunk[-1].bytes <= chunk->start;
    pieces += chunk->returned ? 0 : pieces_of(arena, chunk);
    bytes += chunk->returned ? 0 : chunk->bytes;
    returned += chunk->returned;
  }
  for (void *p = arena->free; p; p = *(void **)p) {
    free_pieces++;
    valid &= !chunk_of(arena, p)->returned;
  }
  return valid && pieces == arena->pieces && bytes == arena->bytes &&
         returned == arena->returned_count &&
         arena->live + free_pieces + arena->fresh_count == arena->pieces;
}
