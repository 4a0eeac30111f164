/* clock.c: vector clocks, which say what comes before what. */
#include "clock.h"

#include <stdlib.h>
#include <string.h>

uint64_t sim_clock_get(const sim_clock *clock, uint32_t slot)
{
  return slot < clock->count ? clock->at[slot] : 0;
}

static void clock_reach(sim *s, sim_clock *clock, uint32_t count)
{
  if (count <= clock->count)
    return;
  if (count > clock->capacity) {
    uint32_t capacity = s->stream_count + 8;
    if (capacity < count)
      capacity = count;
    clock->at = realloc(clock->at, capacity * sizeof *clock->at);
    if (!clock->at)
      abort();
    clock->capacity = capacity;
  }
  memset(clock->at + clock->count, 0, (count - clock->count) * sizeof *clock->at);
  clock->count = count;
}

void sim_clock_set(sim *s, sim_clock *clock, uint32_t slot, uint64_t index)
{
  clock_reach(s, clock, slot + 1);
  clock->at[slot] = index;
}

void sim_clock_join(sim *s, sim_clock *clock, const sim_clock *other)
{
  clock_reach(s, clock, other->count);
  for (uint32_t i = 0; i < other->count; i++)
    if (clock->at[i] < other->at[i])
      clock->at[i] = other->at[i];
}

void sim_clock_copy(sim *s, sim_clock *clock, const sim_clock *other)
{
  clock->count = 0;
  sim_clock_join(s, clock, other);
}

void sim_host_learn(sim *s, const sim_clock *clock)
{
  sim_clock_join(s, &s->host, clock);
  s->host_version++;
}
