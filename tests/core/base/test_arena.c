#include "core/base/arena.h"

#include "check.h"

enum { MANY = 1000 };

static arena_t arena;

static void end(void)
{
  CHECK(arena_is_valid(&arena));
  arena_destroy(&arena);
  CHECK_EQ(arena.bytes, 0);
}

SCENE_WITH(pieces_do_not_overlap, arena_init(&arena, 40))
{
  char *piece[MANY];
  for (int i = 0; i < MANY; i++) {
    piece[i] = arena_take(&arena);
    CHECK(piece[i]);
    memset(piece[i], i % 251, 40);
  }
  for (int i = 0; i < MANY; i++)
    for (int k = 0; k < 40; k++)
      CHECK_EQ((unsigned char)piece[i][k], i % 251);
  CHECK_EQ(arena.live, MANY);
  CHECK(arena.bytes >= MANY * 40);
}

SCENE_WITH(pieces_of_whole_cache_lines_begin_one, arena_init(&arena, 128))
{
  enum { LARGE = 40 << 20 };
  while (arena.bytes < LARGE) /* slabs of all sizes */
    CHECK_EQ((uintptr_t)arena_take(&arena) % 64, 0);
}

/* What the older chunk had left comes before host memory is asked for again. */
SCENE_WITH(reserving_wastes_no_piece, arena_init(&arena, 64))
{
  arena_take(&arena);
  CHECK(arena_reserve(&arena, arena.pieces));
  size_t pieces = arena.pieces;
  for (size_t i = 1; i < pieces; i++)
    CHECK(arena_take(&arena));
  CHECK_EQ(arena.pieces, pieces);
  CHECK_EQ(arena.live, pieces);
}

SCENE_WITH(a_steady_loop_takes_no_host_memory, arena_init(&arena, 64))
{
  void *piece[MANY];
  size_t bytes = 0;
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < MANY; i++)
      piece[i] = arena_take(&arena);
    for (int i = 0; i < MANY; i++)
      arena_give(&arena, piece[(i * 7) % MANY]);
    if (round == 0)
      bytes = arena.bytes;
    CHECK_EQ(arena.bytes, bytes);
    CHECK_EQ(arena.live, 0);
    CHECK(arena_is_valid(&arena));
  }
}

/* Readers without a lock rely on it. */
SCENE_WITH(a_free_piece_keeps_all_but_its_first_word, arena_init(&arena, 64))
{
  char *piece = arena_take(&arena);
  memset(piece, 7, 64);
  arena_give(&arena, piece);
  for (int k = sizeof(void *); k < 64; k++)
    CHECK_EQ(piece[k], 7);
}

SCENE_WITH(a_lost_piece_is_noticed, arena_init(&arena, 64))
{
  arena_take(&arena);
  arena.live--;
  CHECK(!arena_is_valid(&arena));
  arena.live++;
}
