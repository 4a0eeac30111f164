/* clock.c: vector clocks. */
#include "clock.h"

#include <stdlib.h>
#include <string.h>

static int grow(clock_vector *clock, uint32_t count)
{
  if (count <= clock->count)
    return 1;
  /* Few streams come one by one. */
  uint32_t rounded = (count + 7) & ~7u;
  uint64_t *at = realloc(clock->at, rounded * sizeof *at);
  if (!at)
    return 0;
  memset(at + clock->count, 0, (rounded - clock->count) * sizeof *at);
  clock->at = at;
  clock->count = rounded;
  return 1;
}

int clock_raise(clock_vector *clock, uint32_t slot, uint64_t epoch)
{
  if (!grow(clock, slot + 1))
    return 0;
  if (clock->at[slot] < epoch)
    clock->at[slot] = epoch;
  return 1;
}

int clock_join(clock_vector *clock, const clock_vector *other, int *changed)
{
  if (!grow(clock, other->count))
    return 0;
  for (uint32_t i = 0; i < other->count; i++)
    if (clock->at[i] < other->at[i]) {
      clock->at[i] = other->at[i];
      *changed = 1;
    }
  return 1;
}

void clock_clear(clock_vector *clock)
{
  free(clock->at);
  *clock = (clock_vector){0, NULL};
}

clock_copy *clock_copy_make(const clock_vector *clock)
{
  clock_copy *copy = malloc(sizeof *copy);
  int changed;
  if (!copy)
    return NULL;
  *copy = (clock_copy){.references = 1};
  if (clock_join(&copy->clock, clock, &changed))
    return copy;
  free(copy);
  return NULL;
}

void clock_copy_drop(clock_copy *copy)
{
  if (copy && --copy->references == 0) {
    clock_clear(&copy->clock);
    free(copy);
  }
}
