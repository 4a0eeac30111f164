/* Which bytes two accesses have in common, against counting bytes. */
#include "audit/footprint.h"

#include "check.h"

enum { SPAN = 40 };

static int has(const audit_footprint *f, uintptr_t byte)
{
  if (byte < f->begin || byte >= f->begin + f->size)
    return 0;
  return !f->period || (byte - f->begin) % f->period < f->run;
}

static void compare(const audit_footprint *a, const audit_footprint *b)
{
  int overlap = 0, covered = 1;
  for (uintptr_t byte = 0; byte < 2 * SPAN; byte++) {
    overlap |= has(a, byte) && has(b, byte);
    covered &= !has(b, byte) || has(a, byte);
  }
  if (!a->period || !b->period || a->period == b->period)
    CHECK_EQ(footprint_overlaps(a, b), overlap);
  else
    CHECK(footprint_overlaps(a, b) >= overlap);
  CHECK(footprint_covers(a, b) <= covered);
  if (!a->period && b->size > 0)
    CHECK(footprint_covers(a, b) || !covered || b->period);
}

TEST(the_answers_are_those_of_counting)
{
  for (uint32_t seed = 1; seed < 200000; seed++) {
    uint32_t x = seed * 2654435761u;
    audit_footprint f[2];
    for (int i = 0; i < 2; i++) {
      x = x * 1664525u + 1013904223u;
      f[i].begin = (x >> 8) % 20;
      f[i].period = (x >> 13) % 3 ? 0 : 3 + (x >> 16) % 6;
      f[i].run = f[i].period ? 1 + (x >> 20) % f[i].period : 0;
      const size_t rows = 1 + (x >> 24) % 4;
      f[i].size = f[i].period ? (rows - 1) * f[i].period + f[i].run : 1 + (x >> 26) % 12;
    }
    compare(&f[0], &f[1]);
    f[1].period = f[0].period; /* of the same matrix */
    f[1].run = f[1].period ? 1 + f[1].run % f[1].period : 0;
    compare(&f[0], &f[1]);
  }
}

TEST(columns_of_a_matrix_do_not_meet)
{
  const audit_footprint left = {0, 10 * 64 - 32, 64, 32}, right = {32, 10 * 64 - 32, 64, 32};
  const audit_footprint row = {3 * 64, 64, 0, 0};
  CHECK(!footprint_overlaps(&left, &right) && !footprint_overlaps(&right, &left));
  CHECK(footprint_overlaps(&left, &row) && footprint_overlaps(&right, &row));
}
