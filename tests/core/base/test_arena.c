#include "core/base/arena.h"

#include "check.h"

enum { MANY = 1000 };

TEST(pieces_do_not_overlap)
{
  arena_t arena;
  char *piece[MANY];
  arena_init(&arena, 40);
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
  CHECK(arena_is_valid(&arena));
  arena_destroy(&arena);
  CHECK_EQ(arena.bytes, 0);
}

TEST(pieces_of_whole_cache_lines_begin_one)
{
  enum { LARGE = 40 << 20 };
  arena_t arena;
  arena_init(&arena, 128);
  while (arena.bytes < LARGE) /* slabs of all sizes */
    CHECK_EQ((uintptr_t)arena_take(&arena) % 64, 0);
  CHECK(arena_is_valid(&arena));
  arena_destroy(&arena);
}

/* What the older chunk had left comes before host memory is asked for again. */
TEST(reserving_wastes_no_piece)
{
  arena_t arena;
  arena_init(&arena, 64);
  arena_take(&arena);
  CHECK(arena_reserve(&arena, arena.pieces));
  size_t pieces = arena.pieces;
  for (size_t i = 1; i < pieces; i++)
    CHECK(arena_take(&arena));
  CHECK_EQ(arena.pieces, pieces);
  CHECK_EQ(arena.live, pieces);
  CHECK(arena_is_valid(&arena));
  arena_destroy(&arena);
}

TEST(a_steady_loop_takes_no_host_memory)
{
  arena_t arena;
  void *piece[MANY];
  size_t bytes = 0;
  arena_init(&arena, 64);
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
  arena_destroy(&arena);
}

/* Readers without a lock rely on it. */
TEST(a_free_piece_keeps_all_but_its_first_word)
{
  arena_t arena;
  arena_init(&arena, 64);
  char *piece = arena_take(&arena);
  memset(piece, 7, 64);
  arena_give(&arena, piece);
  for (int k = sizeof(void *); k < 64; k++)
    CHECK_EQ(piece[k], 7);
  arena_destroy(&arena);
}

TEST(a_lost_piece_is_noticed)
{
  arena_t arena;
  arena_init(&arena, 64);
  arena_take(&arena);
  arena.live--;
  CHECK(!arena_is_valid(&arena));
  arena_destroy(&arena);
}
