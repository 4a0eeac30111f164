/* draw.h: seeded random numbers (splitmix64), the same on every machine. */
#ifndef ESPER_DRAW_H
#define ESPER_DRAW_H

#include <stdint.h>

static inline uint64_t draw64(uint64_t *state)
{
  uint64_t x = *state += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

static inline uint64_t draw_below(uint64_t *state, uint64_t below)
{
  return draw64(state) % below;
}

/* A file's draw(), from a state of its own. */
#define DRAW_FROM(state)               \
  static uint64_t draw(uint64_t below) \
  {                                    \
    return draw_below(&state, below);  \
  }

#endif
