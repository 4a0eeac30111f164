/* machine.h: the loader's stack, marks and memo, with shadows for values.
 *
 * A container's shadow knows how deep it is nested: 1 when it is empty or holds
 * only scalars, else one more than the deepest container in it.
 *
 * A list or dict that another container holds may not change any more. So the
 * depth of what holds it stays true, and nothing can hold itself. Python's
 * pickler fills a container before it puts it into another one, except where
 * data has circles. */
#ifndef ESPER_PICKLE_MACHINE_H
#define ESPER_PICKLE_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "limits.h"
#include "opcodes.h"

typedef struct shadow {
  unsigned char kind;
  unsigned char depth;
  bool held;           /* another container holds it */
  unsigned short size; /* of a tuple, as a key; at most one more than PICKLE_KEY_LIMIT */
} shadow;

/* An array that grows. */
typedef struct row {
  void *items;
  size_t count, room;
} row;

typedef struct machine {
  row stack;   /* size_t: what the value is, see machine.c */
  row marks;   /* size_t: how high the stack was */
  row memo;    /* size_t, as in the stack */
  row shadows; /* of all containers made */
  size_t memo_filled;
} machine;

typedef enum outcome {
  DONE,
  NOT_POSSIBLE, /* the loader would raise */
  TOO_DEEP,
  CIRCULAR, /* changes what is held */
  HUGE_KEY,
  MEMO_GAP, /* stores far from all other indexes, and the loader's memo is an array */
  NO_MEMORY
} outcome;

/* Obeys one opcode, neither REFUSED nor UNKNOWN. index: its argument, for the
 * memo. STOP needs a value on top of the stack. */
outcome machine_step(machine *m, opcode op, uint64_t index);

/* A machine of zeros is ready to step. */
void machine_free(machine *m);

#endif
