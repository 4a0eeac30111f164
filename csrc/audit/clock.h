/* clock.h: vector clocks. Every lane of work has a slot, and its operations have epochs, which
 * rise. A clock has, for each slot, the highest epoch that its owner comes after. */
#ifndef ESPER_AUDIT_CLOCK_H
#define ESPER_AUDIT_CLOCK_H

#include <stddef.h>
#include <stdint.h>

typedef struct clock_vector {
  uint32_t count; /* beyond, all are 0 */
  uint64_t *at;
} clock_vector;

static inline uint64_t clock_get(const clock_vector *clock, uint32_t slot)
{
  return slot < clock->count ? clock->at[slot] : 0;
}

/* Both return 0 if there is no host memory, and then nothing has changed. clock_join sets *changed
 * if an entry rose. */
int clock_raise(clock_vector *clock, uint32_t slot, uint64_t epoch);
int clock_join(clock_vector *clock, const clock_vector *other, int *changed);
void clock_clear(clock_vector *clock);

/* A copy of a clock that several hold and nobody changes. */
typedef struct clock_copy {
  uint32_t references;
  clock_vector clock;
} clock_copy;

/* NULL: no host memory. Otherwise the caller holds one reference. */
clock_copy *clock_copy_make(const clock_vector *clock);
void clock_copy_drop(clock_copy *copy);

#endif
