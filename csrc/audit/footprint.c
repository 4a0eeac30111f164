/* footprint.c: bytes of dense ranges, and of rows that repeat. */
#include "footprint.h"

/* Whether the rows of `a` meet [begin, end), which lies in its range. */
static int rows_meet(const audit_footprint *a, uintptr_t begin, uintptr_t end)
{
  size_t offset = (begin - a->begin) % a->period;
  return offset < a->run || end - begin > a->period - offset;
}

int footprint_overlaps(const audit_footprint *a, const audit_footprint *b)
{
  uintptr_t begin = a->begin > b->begin ? a->begin : b->begin;
  uintptr_t a_end = a->begin + a->size, b_end = b->begin + b->size;
  uintptr_t end = a_end < b_end ? a_end : b_end;
  if (begin >= end)
    return 0;
  if (!a->period && !b->period)
    return 1;
  if (!b->period)
    return rows_meet(a, begin, end);
  if (!a->period)
    return rows_meet(b, begin, end);
  if (a->period != b->period)
    return 1;
  /* From the later beginning on, one has a row there, and the other `offset` bytes into its
   * period. */
  const audit_footprint *late = a->begin > b->begin ? a : b, *early = late == a ? b : a;
  size_t offset = (late->begin - early->begin) % late->period;
  if (offset < early->run)
    return 1;
  size_t gap = late->period - offset; /* to the early one's next row */
  return gap < late->run && begin + gap < end;
}

int footprint_covers(const audit_footprint *outer, const audit_footprint *inner)
{
  if (inner->begin < outer->begin || inner->begin + inner->size > outer->begin + outer->size)
    return 0;
  if (!outer->period)
    return 1;
  return outer->period == inner->period && outer->run >= inner->run && outer->begin == inner->begin;
}
