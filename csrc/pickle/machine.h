/* machine.h: the loader's stack, marks and memo, with a shadow in place of each container.
 *
 * A shadow knows how deep its container is nested: 1 if it is empty or has only scalars, otherwise
 * one more than the deepest container in it.
 *
 * A list or dict in another container must not change any more. So the depth of the outer one stays
 * right, and nothing can contain itself. Python's pickler fills a container before it puts it into
 * another, unless the data is circular. */
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
  unsigned short size; /* of a tuple as a key; PICKLE_KEY_LIMIT + 1 at most */
} shadow;

/* A growing array. */
typedef struct row {
  void *items;
  size_t count, capacity;
} row;

typedef struct machine {
  row stack;   /* of size_t: the values, see machine.c */
  row marks;   /* of size_t: heights of the stack */
  row memo;    /* of size_t, as in the stack */
  row shadows; /* one for each container made */
  size_t memo_filled;
} machine;

typedef enum outcome {
  DONE,
  NOT_POSSIBLE, /* the loader would raise */
  TOO_DEEP,
  CIRCULAR, /* changes a container that is in another */
  HUGE_KEY,
  MEMO_GAP, /* skips indices; the loader's memo is an array */
  NO_MEMORY
} outcome;

/* Executes one opcode, neither REFUSED nor UNKNOWN. `index` is its argument, for the memo. STOP
 * needs a value on top of the stack. */
outcome machine_step(machine *m, opcode op, uint64_t index);

/* Frees what the machine has. A machine of zeros is ready to use. */
void machine_free(machine *m);

#endif
